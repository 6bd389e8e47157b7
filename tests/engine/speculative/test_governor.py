"""The governor in worlds whose costs are known, against the best length found by trying all."""

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculative.cycle import Cycle
from engine.speculative.governor import (
    NUM_CONFIDENCE_BINS,
    PROBE_CYCLES,
    PROBE_TOKENS,
    DraftState,
    Expectation,
    FixedLength,
    Governor,
    confidence_bin,
)

MAX_LENGTH = 12
SIZES = [48 * (1 - 0.85**num_tokens) for num_tokens in range(1, MAX_LENGTH + 2)]
"""Experts that passes over 1, 2, ... tokens visit."""
SURE, UNSURE = 0.95, 0.25


class World(NamedTuple):
    """What a machine really takes, per expert where nothing else is said."""

    acceptance: float = 0.8
    draft_seconds: float = 1.0
    """Of one token."""
    pass_seconds: float = 4.0
    """Of verification beside its experts."""
    expert_seconds: float = 0.1
    expert_bytes: float = 1.0
    bandwidth: float = 1.0
    slack_seconds: float = 0.0

    def tokens(self, length: int) -> float:
        return sum(self.acceptance**position for position in range(length + 1))

    def verify(self, length: int) -> float:
        return self.pass_seconds + self.expert_seconds * SIZES[length]

    def transfer(self, length: int) -> float:
        return self.expert_bytes * SIZES[length]

    def seconds(self, length: int) -> float:
        compute = length * self.draft_seconds + self.verify(length)
        return max(self.transfer(length) / self.bandwidth, compute) + self.slack_seconds

    def throughput(self, length: int) -> float:
        return self.tokens(length) / self.seconds(length)

    def best_length(self, max_seconds: float = math.inf) -> int:
        lengths = [k for k in range(MAX_LENGTH + 1) if k == 0 or self.seconds(k) <= max_seconds]
        return max(lengths, key=self.throughput)

    def expectation(self) -> Expectation:
        ends = (0, MAX_LENGTH)
        return Expectation(
            acceptance_rate=self.acceptance,
            acceptance_by_confidence=[self.acceptance] * NUM_CONFIDENCE_BINS,
            draft_seconds=self.draft_seconds,
            pass_experts=SIZES,
            verify_seconds=[self.verify(length) for length in ends],
            transfer_bytes=[self.transfer(length) for length in ends],
            bandwidth=self.bandwidth,
        )

    def cycle(self, confidences: list[float], num_accepted: int) -> Cycle:
        length = len(confidences)
        return Cycle(
            confidences=confidences,
            num_accepted=num_accepted,
            draft_seconds=length * self.draft_seconds,
            verify_seconds=self.verify(length),
            seconds=self.seconds(length),
            transfer_bytes=self.transfer(length),
            transfer_seconds=self.transfer(length) / self.bandwidth,
        )


def governor_of(world: World, max_cycle_seconds: float = math.inf) -> Governor:
    return Governor(MAX_LENGTH, max_cycle_seconds, world.expectation())


def draft(governor: Governor, world: World, is_planned: bool, confidence: Callable[[], float]) -> list[float]:
    """Confidences of the tokens that the governor wants; with plans, each row's transfers are known a pass later."""
    confidences: list[float] = []
    while True:
        length = len(confidences)
        state = DraftState(confidences, length, world.transfer(length - 1) if length else None)
        if not governor.wants_token(state if is_planned else DraftState(confidences)):
            return confidences
        confidences.append(confidence())


def live(governor: Governor, world: World, num_cycles: int, is_planned: bool = True) -> list[int]:
    """The lengths of so many cycles."""
    dice = random.Random(0)
    lengths = []
    for _ in range(num_cycles):
        confidences = draft(governor, world, is_planned, lambda: 0.7)
        num_accepted = 0
        while num_accepted < len(confidences) and dice.random() < world.acceptance:
            num_accepted += 1
        governor.cycle_ended(world.cycle(confidences, num_accepted))
        lengths.append(len(confidences))
    return lengths


def share_of_the_best(world: World, lengths: list[int], max_seconds: float = math.inf) -> float:
    """Of the tokens per second that the best length would have had; probes aside, which are the price of knowing."""
    idle = [0] * PROBE_CYCLES
    lengths = [k for i, k in enumerate(lengths) if i < PROBE_CYCLES or lengths[i - PROBE_CYCLES : i] != idle]
    reached = sum(map(world.tokens, lengths)) / sum(map(world.seconds, lengths))
    return reached / world.throughput(world.best_length(max_seconds))


WORLDS = {
    "a slow link, which a longer draft uses better": World(bandwidth=0.2),
    "a slow link and a bad draft": World(bandwidth=0.2, acceptance=0.3),
    "a link that hides behind the computation": World(bandwidth=50.0),
    "dear verification": World(pass_seconds=50.0, bandwidth=50.0, acceptance=0.9),
    "a good draft that is not free": World(draft_seconds=1.5, bandwidth=50.0, acceptance=0.9),
    "a dear draft": World(draft_seconds=6.0, bandwidth=50.0),
    "a draft that costs nothing": World(draft_seconds=0.0, bandwidth=50.0, expert_seconds=0.0),
    "experts that cost more than the tokens are worth": World(expert_seconds=3.0, bandwidth=50.0, acceptance=0.5),
    "nothing to be moved": World(expert_bytes=0.0),
    "time that nobody accounts for": World(slack_seconds=20.0, bandwidth=50.0),
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("is_planned", [True, False])
def test_the_length_becomes_the_best(world: World, is_planned: bool) -> None:
    lengths = live(governor_of(world), world, 400, is_planned)
    assert share_of_the_best(world, lengths[200:]) > 0.97


def test_the_worlds_differ() -> None:
    assert {world.best_length() for world in WORLDS.values()} >= {0, 12}
    assert len({world.best_length() for world in WORLDS.values()}) >= 5


@given(
    st.builds(
        World,
        acceptance=st.floats(0.1, 0.95),
        draft_seconds=st.floats(0.1, 10.0),
        pass_seconds=st.floats(1.0, 50.0),
        expert_seconds=st.floats(0.0, 1.0),
        bandwidth=st.floats(0.1, 50.0),
        slack_seconds=st.floats(0.0, 5.0),
    )
)
@settings(max_examples=25)
def test_the_length_is_nowhere_far_from_the_best(world: World) -> None:
    """The acceptance rate is known as well as a few dozen tokens tell it."""
    lengths = live(governor_of(world), world, 300)
    assert share_of_the_best(world, lengths[150:]) > 0.85


@pytest.mark.parametrize("acceptance", [0.3, 0.9])
@pytest.mark.parametrize("factor", [0.1, 10.0])
@pytest.mark.parametrize("what", ["bandwidth", "draft_seconds", "acceptance"])
def test_wrong_expectations_are_given_up(what: str, factor: float, acceptance: float) -> None:
    world = World(bandwidth=2.0, acceptance=acceptance)
    believed = world._replace(**{what: min(0.95, getattr(world, what) * factor) if what == "acceptance" else factor})
    governor = Governor(MAX_LENGTH, math.inf, believed.expectation())
    assert share_of_the_best(world, live(governor, world, 800)[600:]) > 0.95


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_the_bandwidth_is_soon_known_whatever_the_units(factor: float) -> None:
    """In bytes and seconds as real ones are, where an expectation must not weigh as much as its bytes."""
    world = World(expert_bytes=2e7, bandwidth=5e9, pass_seconds=0.2, draft_seconds=0.01, expert_seconds=1e-3)
    governor = Governor(MAX_LENGTH, math.inf, world._replace(bandwidth=factor * world.bandwidth).expectation())
    live(governor, world, 100)
    assert governor.estimates is not None
    assert governor.estimates.bandwidth == pytest.approx(world.bandwidth, rel=0.2)


def test_where_all_is_resident_the_first_transfer_tells_the_bandwidth() -> None:
    resident = World(expert_bytes=0.0, bandwidth=1e15)
    governor = governor_of(resident)
    live(governor, resident, 3)
    moving = World(expert_bytes=2e7, bandwidth=5e9)
    live(governor, moving, 1)
    governor.wants_token(DraftState([]))
    assert governor.estimates is not None
    assert governor.estimates.bandwidth < 1e10


def test_where_a_draft_is_no_use_there_is_none_but_a_probe_now_and_then() -> None:
    world = World(acceptance=0.0, draft_seconds=3.0)
    lengths = live(governor_of(world), world, 10 * (PROBE_CYCLES + 1))
    assert lengths == ([0] * PROBE_CYCLES + [PROBE_TOKENS]) * 10


def test_a_draft_that_becomes_good_again_is_found_by_a_probe() -> None:
    good = World(acceptance=0.9, bandwidth=50.0, pass_seconds=50.0)
    bad = good._replace(acceptance=0.0)
    governor = governor_of(good)
    assert share_of_the_best(bad, live(governor, bad, 600)[400:]) > 0.97
    assert share_of_the_best(good, live(governor, good, 1000)[800:]) > 0.97


@pytest.mark.parametrize("max_seconds", [11.0, 28.0, 1000.0])
def test_cycles_take_no_longer_than_they_may(max_seconds: float) -> None:
    world = World(bandwidth=0.7, acceptance=0.9)
    lengths = live(governor_of(world, max_seconds), world, 300)
    assert all(world.seconds(length) <= max_seconds * 1.01 for length in lengths)
    assert share_of_the_best(world, lengths[150:], max_seconds) > 0.97


def test_where_even_the_shortest_cycle_is_too_long_nothing_is_drafted() -> None:
    world = World(bandwidth=0.2, acceptance=0.9)
    lengths = live(governor_of(world, max_cycle_seconds=world.seconds(0) / 2), world, 40)
    assert set(lengths) == {0}


def taught(world: World, num_cycles: int = 300) -> Governor:
    """A governor that has seen sure tokens accepted, and unsure ones rejected."""
    governor = governor_of(world)
    dice = random.Random(1)
    for _ in range(num_cycles):
        confidences = [dice.choice([SURE, UNSURE]) for _ in range(4)]
        num_accepted = next((i for i, confidence in enumerate(confidences) if confidence == UNSURE), 4)
        governor.cycle_ended(world.cycle(confidences, num_accepted))
    return governor


def test_a_draft_ends_at_a_token_that_will_hardly_be_accepted() -> None:
    governor = taught(World(bandwidth=1.0, pass_seconds=10.0))
    assert governor.wants_token(DraftState([SURE] * 2))
    assert not governor.wants_token(DraftState([UNSURE] * 2))
    assert not governor.wants_token(DraftState([SURE, UNSURE]))


def test_behind_a_rejected_token_nothing_is_learned() -> None:
    governor = governor_of(World())
    for _ in range(100):
        governor.cycle_ended(World().cycle([SURE, UNSURE, SURE, SURE], num_accepted=1))
    rates = [rate.value for rate in governor._acceptance]
    assert rates[confidence_bin(SURE)] > 0.9
    assert rates[confidence_bin(UNSURE)] < 0.4


def test_what_the_plan_says_is_believed_more_than_the_average() -> None:
    """Where the tokens drafted so far happen to move much, the cycle takes longer than usual."""
    world = World(bandwidth=1.0, acceptance=0.8)
    governor = governor_of(world)
    live(governor, world, 100)
    usual = DraftState([0.7] * 2, 2, world.transfer(1))
    heavy = usual._replace(transfer_bytes=5 * world.transfer(1))
    governor.wants_token(usual)
    assert governor.estimates is not None
    usual_seconds = governor.estimates.cycle_seconds
    governor.wants_token(heavy)
    assert governor.estimates.cycle_seconds > usual_seconds
    assert governor.estimates.transfer_bytes >= 5 * world.transfer(1)


def test_a_draft_is_never_longer_than_it_may_be() -> None:
    free = World(acceptance=1.0, draft_seconds=0.0, expert_seconds=0.0, bandwidth=1e6)
    governor = governor_of(free)
    assert not governor.wants_token(DraftState([0.9] * MAX_LENGTH))
    assert live(governor, free, 5) == [MAX_LENGTH] * 5
    none = Governor(0, math.inf, free.expectation())
    assert not none.wants_token(DraftState([]))


def test_estimates_are_those_of_the_decision() -> None:
    world = World(bandwidth=0.5, acceptance=0.75, slack_seconds=3.0)
    governor = governor_of(world)
    assert governor.estimates is None
    length = live(governor, world, 300)[-1]
    estimates = governor.estimates
    assert estimates is not None
    assert estimates.bandwidth == pytest.approx(world.bandwidth)
    assert estimates.draft_seconds == pytest.approx(world.draft_seconds)
    assert estimates.acceptance_rate == pytest.approx(world.acceptance, abs=0.12)
    assert estimates.transfer_bytes == pytest.approx(world.transfer(length), rel=0.05)
    assert estimates.verify_seconds == pytest.approx(world.verify(length), rel=0.05)
    assert estimates.cycle_seconds == pytest.approx(world.seconds(length), rel=0.1)


@given(st.floats(0.0, 1.0))
def test_every_confidence_has_a_bin(confidence: float) -> None:
    assert 0 <= confidence_bin(confidence) < NUM_CONFIDENCE_BINS
    assert confidence_bin(confidence) <= confidence * NUM_CONFIDENCE_BINS <= confidence_bin(confidence) + 1


@pytest.mark.parametrize("length", [0, 1, 4])
def test_a_fixed_length_is_kept(length: int) -> None:
    control = FixedLength(length)
    assert control.max_length == length
    assert control.estimates is None
    wanted = 0
    while control.wants_token(DraftState([0.5] * wanted)):
        wanted += 1
    control.cycle_ended(World().cycle([0.5] * length, 0))
    assert wanted == length
