from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from engine.choice import PRIOR_WEIGHT, draft_control, draft_expectation, hardware, link_bandwidth, predicted_seconds
from engine.config import BenchConfig
from engine.forecast import ACCEPTANCE_RATE, NGRAM_ACCEPTANCE_RATE
from engine.planning import Alternative, alternatives, choose
from engine.profile import PassTimes, Profile, ProfiledToken
from engine.protocol import ModelPlan, Tier
from engine.speculative.governor import DraftState, FixedLength, Governor, confidence_bin
from tests.engine.plans import GB, cuda, describe, save_config
from tests.engine.texts import token
from tests.engine.tiny import mixtral_config

TIMES = PassTimes(verify_seconds=(1.0, 1.5), verify_experts=(10, 20), draft_seconds=0.25)
TOP_K = 2
NUM_LAYERS = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config(mixtral_config(num_layers=NUM_LAYERS), tmp_path_factory.mktemp("config"))


def settings(path: Path, **changed: object) -> BenchConfig:
    chosen = {
        "model": str(path),
        "draft_group_size": 32,
        "draft_weights": "qint4",
        "device_memory": "1GB",
        "host_memory": "1GB",
    }
    return BenchConfig.model_validate(chosen | changed)


def with_slots(path: Path, drafting: int, plain: int, **changed: object) -> list[Alternative]:
    """With a quantized draft, and without, each with so many slots of 18."""
    found = alternatives(settings(path, **changed), describe(path, "cuda"), cuda(None, GB))
    slots = (drafting, plain)
    return [
        Alternative(msgspec.structs.replace(plan, num_slots=num_slots), choices)
        for (plan, choices), num_slots in zip(found, slots, strict=True)
    ]


def disjoint_text(num_tokens: int, *, is_drafted: bool = True) -> list[ProfiledToken]:
    """Each token wants other experts than the one before, and the same as the one three before."""
    routes = [[[2 * (n % 3), 2 * (n % 3) + 1]] * NUM_LAYERS for n in range(num_tokens)]
    confidence = 0.95 if is_drafted else 0.05
    return [token(experts, is_drafted=is_drafted, confidence=confidence) for experts in routes]


def test_a_pass_and_its_experts_are_told_apart_by_two_passes() -> None:
    machine = hardware(TIMES, 7.0)
    assert machine.bandwidth == 7.0
    assert machine.expert_seconds == pytest.approx(0.05)
    assert machine.pass_seconds == pytest.approx(0.5)
    assert machine.draft_seconds == 0.25


@pytest.mark.parametrize(
    ("most", "expert_seconds", "pass_seconds"),
    [(0.8, 0.0, 1.0), (9.0, 0.1, 0.0)],
    ids=["more experts in less time", "experts dearer than a pass"],
)
def test_noise_does_not_make_times_negative(most: float, expert_seconds: float, pass_seconds: float) -> None:
    machine = hardware(msgspec.structs.replace(TIMES, verify_seconds=(1.0, most)), 1.0)
    assert machine.expert_seconds == pytest.approx(expert_seconds)
    assert machine.pass_seconds == pytest.approx(pass_seconds)


@pytest.mark.parametrize(
    ("num_host", "bandwidths", "expected"),
    [
        (18, {"host": 30.0, "disk": 10.0}, 30.0),
        (0, {"host": 30.0, "disk": 10.0}, 10.0),
        (9, {"host": 30.0, "disk": 10.0}, 15.0),  # half of the bytes at each
        (12, {"host": 30.0, "disk": 10.0}, 18.0),
    ],
)
def test_tiers_share_the_link_by_their_bytes(
    path: Path, num_host: int, bandwidths: dict[Tier, float], expected: float
) -> None:
    plan = plan_of(path, num_host_experts=num_host)
    assert plan.num_experts == 18
    assert link_bandwidth(plan, bandwidths) == pytest.approx(expected)


def test_a_link_that_nothing_was_measured_of_is_no_hindrance(path: Path) -> None:
    assert link_bandwidth(plan_of(path), {}) >= 1e15


def plan_of(path: Path, **changed: object) -> ModelPlan:
    return msgspec.structs.replace(with_slots(path, 6, 6)[0].plan, **changed)


def chosen_drafter(
    path: Path, slots: tuple[int, int], text: Sequence[ProfiledToken], bandwidth: float, draft_seconds: float
) -> str:
    found, times = with_slots(path, *slots), PassTimes((0.01, 0.011), (6, 18), draft_seconds)
    sizes = describe(path, "cuda").sizes
    predict = predicted_seconds(settings(path), sizes, TOP_K, Profile(list(text), times), {"host": bandwidth})
    return choose(found, predict).choices.drafter


def test_the_draft_is_chosen_where_its_window_moves_each_expert_once(path: Path) -> None:
    """With six slots each token misses everything, unless a window takes several of them together."""
    slow = plan_of(path).expert_bytes / 0.1
    assert chosen_drafter(path, (6, 6), disjoint_text(60), slow, draft_seconds=0.005) == "quantized"


def test_no_draft_is_chosen_where_its_memory_would_hold_every_expert(path: Path) -> None:
    slow = plan_of(path).expert_bytes / 0.1
    assert chosen_drafter(path, (2, 18), disjoint_text(60), slow, draft_seconds=0.005) == "ngram"


def test_no_draft_is_chosen_that_is_never_right(path: Path) -> None:
    slow = plan_of(path).expert_bytes / 0.1
    text = disjoint_text(60, is_drafted=False)
    assert chosen_drafter(path, (4, 6), text, slow, draft_seconds=0.1) == "ngram"


def test_the_choice_says_what_was_predicted(path: Path) -> None:
    found = with_slots(path, 5, 7)
    best = choose(found, lambda alternative: 0.002 if alternative.choices.draft else 0.001)
    assert best.plan.num_slots == 7
    assert best.plan.decisions[-1] == (
        "Predicted per output token: 2 ms with a qint4-g32 draft and 5 slots, 1 ms with n-grams and 7 slots."
    )


def test_acceptance_begins_with_the_profile_and_a_prior(path: Path) -> None:
    sure, unsure = 0.95, 0.15
    text = [
        token([[0]], is_drafted=False, confidence=0.0),  # nothing is proposed before the first
        *[token([[0]], is_drafted=True, confidence=sure)] * 30,
        *[token([[0]], is_drafted=False, confidence=sure)] * 10,
        *[token([[0]], is_drafted=False, confidence=unsure)] * 20,
    ]
    (plan, choices), _ = with_slots(path, 6, 6)
    expected = draft_expectation(plan, choices, describe(path, "cuda").sizes, TOP_K, TIMES, text, 1e6)
    assert expected.acceptance_rate == pytest.approx((PRIOR_WEIGHT * ACCEPTANCE_RATE + 30) / (PRIOR_WEIGHT + 60))
    by_bin = expected.acceptance_by_confidence
    assert by_bin[confidence_bin(sure)] == pytest.approx((PRIOR_WEIGHT * 0.975 + 30) / (PRIOR_WEIGHT + 40))
    assert by_bin[confidence_bin(unsure)] == pytest.approx(PRIOR_WEIGHT * 0.575 / (PRIOR_WEIGHT + 20))
    assert by_bin[confidence_bin(0.55)] == pytest.approx((1 + 0.55) / 2)  # of which the text has none


def test_without_a_quantized_draft_confidence_says_nothing(path: Path) -> None:
    _, (plan, choices) = with_slots(path, 6, 6)
    expected = draft_expectation(plan, choices, describe(path, "cuda").sizes, TOP_K, TIMES, disjoint_text(9), 1e6)
    assert expected.draft_seconds == 0.0
    assert {expected.acceptance_rate, *expected.acceptance_by_confidence} == {NGRAM_ACCEPTANCE_RATE}


def test_passes_are_expected_to_grow_with_the_experts_that_they_visit(path: Path) -> None:
    (plan, choices), _ = with_slots(path, 9, 6)
    expected = draft_expectation(plan, choices, describe(path, "cuda").sizes, TOP_K, TIMES, (), 1e6)
    assert expected.pass_experts[0] == pytest.approx(NUM_LAYERS * TOP_K)
    assert expected.pass_experts[1] == pytest.approx(NUM_LAYERS * 6 * (1 - (1 - TOP_K / 6) ** 2))
    assert list(expected.pass_experts) == sorted(expected.pass_experts)
    ends = (expected.pass_experts[0], expected.pass_experts[-1])
    assert list(expected.verify_seconds) == pytest.approx([0.5 + 0.05 * count for count in ends])
    assert expected.transfer_bytes[0] == pytest.approx(6 * plan.expert_bytes / 2)  # half are resident


def test_a_governor_begins_where_nothing_is_ever_moved(path: Path) -> None:
    """With a slot for each expert it drafts if that computes less, and learns without a division by nothing."""
    (plan, choices), _ = with_slots(path, 18, 18)
    for draft_seconds, is_wanted in ((0.01, True), (5.0, False)):
        times = msgspec.structs.replace(TIMES, draft_seconds=draft_seconds)
        expected = draft_expectation(plan, choices, describe(path, "cuda").sizes, TOP_K, times, disjoint_text(60), 1e6)
        assert list(expected.transfer_bytes) == [0.0, 0.0]
        control = draft_control(settings(path), choices, expected)
        assert isinstance(control, Governor)
        assert control.wants_token(DraftState(())) is is_wanted


def test_a_length_that_is_set_is_kept(path: Path) -> None:
    (plan, choices), _ = with_slots(path, 6, 6)
    expected = draft_expectation(plan, choices, describe(path, "cuda").sizes, TOP_K, TIMES, (), 1e6)
    control = draft_control(settings(path, draft_length=3), choices._replace(draft_length=3), expected)
    assert isinstance(control, FixedLength)
    assert control.max_length == 3
