from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.experts.layout import ExpertId
from engine.experts.policy import DecayedFrequency, EvictionPolicy, ExpertIndex, Mask, PerLayerLru, eviction_policy

NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS = 3, 4, 6
INDEX = ExpertIndex([NUM_EXPERTS] * NUM_LAYERS)
EVERYTHING = [INDEX.expert(number) for number in range(INDEX.num_experts)]


def mask_of(experts: Iterable[tuple[int, int]], index: ExpertIndex = INDEX) -> Mask:
    mask = np.zeros(index.num_experts, np.bool_)
    mask[[index.number(ExpertId(*expert)) for expert in experts]] = True
    return mask


# Numbers.


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_experts_are_numbered_through_all_layers(experts_per_layer: list[int]) -> None:
    index = ExpertIndex(experts_per_layer)
    experts = [ExpertId(layer, e) for layer, count in enumerate(experts_per_layer) for e in range(count)]
    assert index.num_layers == len(experts_per_layer)
    assert [index.expert(number) for number in range(index.num_experts)] == experts
    assert [index.number(expert) for expert in experts] == list(range(len(experts)))
    for layer in range(index.num_layers):
        assert all(expert.layer == layer for expert in experts[index.layer(layer)])
        assert len(experts[index.layer(layer)]) == experts_per_layer[layer]


# What may have happened.


class Step(NamedTuple):
    what: str
    expert: ExpertId
    """Inserted or removed."""
    rows: Mapping[int, Sequence[int]]
    """Of a visit to the expert's layer."""
    num_tokens: int


@st.composite
def steps(draw: st.DrawFn) -> Step:
    num_tokens = draw(st.integers(1, 5))
    positions = st.lists(st.integers(0, num_tokens - 1), min_size=1, unique=True)
    rows = st.dictionaries(st.integers(0, NUM_EXPERTS - 1), positions, min_size=1)
    what = draw(st.sampled_from(["insert", "remove", "visit"]))
    return Step(what, draw(st.sampled_from(EVERYTHING)), draw(rows), num_tokens)


histories = st.lists(steps(), max_size=25)


def tell(policy: EvictionPolicy, history: list[Step]) -> list[Step]:
    """What can have happened of the history, after the policy has been told of it."""
    resident: set[ExpertId] = set()
    happened = []
    for step in history:
        match step.what:
            case "visit":
                policy.visit(step.expert.layer, step.rows, step.num_tokens)
            case "insert" if step.expert not in resident:
                resident.add(step.expert)
                policy.insert(step.expert)
            case "remove" if step.expert in resident:
                resident.remove(step.expert)
                policy.remove(step.expert)
            case _:
                continue
        happened.append(step)
    return happened


# The baseline.


class SlowLru:
    """What `PerLayerLru` should do, out of a list of all that happened."""

    def __init__(self, happened: list[Step]) -> None:
        self.resident: set[ExpertId] = set()
        self.uses: list[ExpertId] = []
        for step in happened:
            if step.what == "visit":
                self.uses += [ExpertId(step.expert.layer, expert) for expert in step.rows]
            elif step.what == "insert":
                self.resident.add(step.expert)
                self.uses.append(step.expert)
            else:
                self.resident.remove(step.expert)

    def num_resident(self, layer: int) -> int:
        return sum(expert.layer == layer for expert in self.resident)

    def last_use(self, expert: ExpertId) -> int:
        return max((time for time, used in enumerate(self.uses) if used == expert), default=-1)

    def victim(self, layer: int, evictable: set[ExpertId]) -> ExpertId | None:
        layers = {expert.layer for expert in evictable}
        if not layers:
            return None
        is_full = self.num_resident(layer) >= NUM_SLOTS // NUM_LAYERS
        fullest = max(sorted(layers), key=self.num_resident)
        chosen = layer if is_full and layer in layers else fullest
        return min(sorted(expert for expert in evictable if expert.layer == chosen), key=self.last_use)


@given(histories, st.integers(0, NUM_LAYERS - 1), st.sets(st.sampled_from(EVERYTHING)))
def test_lru_is_what_the_slow_one_is(history: list[Step], layer: int, evictable: set[ExpertId]) -> None:
    policy = PerLayerLru(INDEX, NUM_SLOTS)
    slow = SlowLru(tell(policy, history))
    assert policy.victim(layer, mask_of(evictable)) == slow.victim(layer, evictable)
    evictable &= slow.resident
    assert policy.victim(layer, mask_of(evictable)) == slow.victim(layer, evictable)


def lru_with(experts: list[tuple[int, int]], num_slots: int = NUM_SLOTS) -> PerLayerLru:
    policy = PerLayerLru(INDEX, num_slots)
    for expert in experts:
        policy.insert(ExpertId(*expert))
    return policy


def test_the_least_recently_used_expert_of_the_layer_goes_first() -> None:
    experts = [(0, 0), (0, 1), (0, 2)]
    policy = lru_with(experts)
    assert policy.victim(0, mask_of(experts)) == (0, 0)
    policy.visit(0, {0: [0]}, 1)
    assert policy.victim(0, mask_of(experts)) == (0, 1)
    policy.remove(ExpertId(0, 1))
    assert policy.victim(0, mask_of([(0, 0), (0, 2)])) == (0, 2)


def test_asking_changes_nothing() -> None:
    policy = lru_with([(0, 0), (0, 1)])
    evictable = mask_of([(0, 0), (0, 1)])
    assert policy.victim(0, evictable) == policy.victim(0, evictable) == (0, 0)
    assert np.flatnonzero(evictable).tolist() == [0, 1]


def test_a_layer_with_its_share_takes_from_itself_even_where_another_holds_more() -> None:
    experts = [(1, 0), (1, 1), (1, 2), (0, 0), (0, 1)]
    assert lru_with(experts).victim(0, mask_of(experts)) == (0, 0)


def test_a_layer_below_its_share_takes_from_the_fullest() -> None:
    experts = [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    assert lru_with(experts).victim(0, mask_of(experts)) == (2, 0)


def test_what_may_not_be_evicted_is_passed_over() -> None:
    experts = [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    policy = lru_with(experts)
    assert policy.victim(0, mask_of(experts[1:])) == (0, 1)
    # Nothing of its own to give: then the fullest other layer.
    assert policy.victim(0, mask_of(experts[2:])) == (2, 0)
    assert policy.victim(0, mask_of([(1, 0)])) == (1, 0)
    assert policy.victim(0, mask_of([])) is None


def test_fewer_slots_than_layers_still_give_each_layer_a_share_of_one() -> None:
    policy = lru_with([(0, 0), (1, 0)], num_slots=2)
    assert policy.victim(0, mask_of([(0, 0), (1, 0)])) == (0, 0)
    assert policy.victim(2, mask_of([(0, 0), (1, 0)])) in {(0, 0), (1, 0)}


# Frequencies.


def slow_scores(happened: list[Step]) -> dict[ExpertId, float]:
    """Each use fades with every token of the layer after it."""
    scores = dict.fromkeys(EVERYTHING, 0.0)
    for step in happened:
        if step.what != "visit":
            continue
        for row in range(step.num_tokens):
            for expert in EVERYTHING:
                if expert.layer == step.expert.layer:
                    scores[expert] *= DecayedFrequency.DECAY
                    scores[expert] += row in step.rows.get(expert.expert, ())
    return scores


@given(histories, st.integers(0, NUM_LAYERS - 1), st.sets(st.sampled_from(EVERYTHING)))
def test_the_least_frequent_of_late_is_what_the_slow_count_says(
    history: list[Step], layer: int, evictable: set[ExpertId]
) -> None:
    policy = DecayedFrequency(INDEX)
    scores = slow_scores(tell(policy, history))
    assert policy._score.tolist() == pytest.approx([scores[expert] for expert in EVERYTHING])
    victim = policy.victim(layer, mask_of(evictable))
    if not evictable:
        assert victim is None
        return
    assert victim in evictable
    assert scores[victim] == pytest.approx(min(scores[expert] for expert in evictable))


def test_an_expert_that_was_often_used_outlives_one_that_was_used_last() -> None:
    policy = DecayedFrequency(INDEX)
    for _ in range(5):
        policy.visit(0, {0: [0]}, 1)
    policy.visit(0, {1: [0]}, 1)
    assert policy.victim(0, mask_of([(0, 0), (0, 1)])) == (0, 1)
    for _ in range(60):
        policy.visit(0, {1: [0]}, 1)
    assert policy.victim(0, mask_of([(0, 0), (0, 1)])) == (0, 0)


def test_uses_are_remembered_through_an_eviction() -> None:
    policy = DecayedFrequency(INDEX)
    policy.insert(ExpertId(0, 0))
    policy.visit(0, {0: [0, 1, 2]}, 3)
    policy.remove(ExpertId(0, 0))
    policy.insert(ExpertId(0, 1))
    policy.visit(0, {1: [2]}, 3)
    policy.insert(ExpertId(0, 0))
    assert policy.victim(0, mask_of([(0, 0), (0, 1)])) == (0, 1)


def test_uses_fade_with_the_tokens_of_their_own_layer_only() -> None:
    policy = DecayedFrequency(INDEX)
    policy.visit(0, {0: [0]}, 1)
    policy.visit(1, {0: [0]}, 1)
    policy.visit(1, {1: [0]}, 1)
    assert policy.victim(2, mask_of([(0, 0), (1, 0)])) == (1, 0)


def test_policies_have_names() -> None:
    assert isinstance(eviction_policy("lru", INDEX, NUM_SLOTS), PerLayerLru)
    assert isinstance(eviction_policy("lookahead", INDEX, NUM_SLOTS), DecayedFrequency)
