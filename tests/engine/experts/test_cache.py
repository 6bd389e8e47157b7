from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.device import DONE, DoneEvent
from engine.experts.cache import ExpertCache, Slot, SlotState
from engine.experts.layout import ExpertId
from engine.experts.policy import ExpertIndex

NUM_SLOTS = 4
NUM_LAYERS = 3
NUM_EXPERTS = 3
INDEX = ExpertIndex([NUM_EXPERTS] * NUM_LAYERS)
EVERYTHING = [ExpertId(layer, expert) for layer in range(NUM_LAYERS) for expert in range(NUM_EXPERTS)]

expert_ids = st.sampled_from(EVERYTHING)


def make_cache(num_slots: int = NUM_SLOTS) -> ExpertCache:
    return ExpertCache(torch.zeros(num_slots, 8, dtype=torch.uint8), INDEX)


def reserve(cache: ExpertCache, layer: int, expert: int, is_prefetch: bool = False) -> Slot:
    return cache.reserve(ExpertId(layer, expert), is_prefetch)


def make_ready(cache: ExpertCache, layer: int, expert: int, is_prefetch: bool = False) -> Slot:
    slot = reserve(cache, layer, expert, is_prefetch)
    cache.fill(slot, [DONE])
    return slot


class SlotSnapshot(NamedTuple):
    state: SlotState
    owner: ExpertId | None
    generation: int
    num_users: int
    is_unused_prefetch: bool


def snapshot(cache: ExpertCache) -> list[SlotSnapshot]:
    return [SlotSnapshot(s.state, s.owner, s.generation, s.num_users, s.is_unused_prefetch) for s in cache._slots]


class CacheMachine(RuleBasedStateMachine):
    """Does to a cache whatever may be done to it, and knows by itself what that should lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache()
        self.loading: dict[ExpertId, Slot] = {}
        self.ready: set[ExpertId] = set()
        self.pinned: list[Slot] = []
        self.unused_prefetches: set[ExpertId] = set()
        self.num_evictions = 0

    def idle(self) -> set[ExpertId]:
        return self.ready - {slot.owner for slot in self.pinned if slot.owner is not None}

    @precondition(lambda self: self.cache.num_empty)
    @rule(expert=expert_ids, is_prefetch=st.booleans())
    def reserve(self, expert: ExpertId, is_prefetch: bool) -> None:
        if expert in self.cache:
            return
        before = snapshot(self.cache)
        slot = self.cache.reserve(expert, is_prefetch)
        assert before[slot.index].state is SlotState.EMPTY
        others = [old for index, old in enumerate(before) if index != slot.index]
        assert [new for index, new in enumerate(snapshot(self.cache)) if index != slot.index] == others
        assert slot.generation == before[slot.index].generation + 1
        self.loading[expert] = slot
        if is_prefetch:
            self.unused_prefetches.add(expert)

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        expert = data.draw(st.sampled_from(sorted(self.idle())))
        assert self.cache.evict(expert) == (expert in self.unused_prefetches)
        self.ready.remove(expert)
        self.num_evictions += 1
        self.unused_prefetches.discard(expert)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        expert = data.draw(st.sampled_from(sorted(self.loading)))
        self.cache.fill(self.loading.pop(expert), [DONE])
        self.ready.add(expert)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        expert = data.draw(st.sampled_from(sorted(self.loading)))
        self.cache.abandon(self.loading.pop(expert))
        self.unused_prefetches.discard(expert)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        expert = data.draw(st.sampled_from(sorted(self.ready)))
        slot = self.cache.pin(expert)
        assert slot.owner == expert
        self.pinned.append(slot)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data(), was_used=st.booleans())
    def unpin(self, data: st.DataObject, was_used: bool) -> None:
        slot = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        assert slot.owner is not None
        self.cache.unpin(slot, DONE if was_used else None)
        if was_used:
            self.unused_prefetches.discard(slot.owner)

    @invariant()
    def the_cache_is_as_expected(self) -> None:
        self.cache.check_integrity()
        cached = self.ready | self.loading.keys()
        assert {expert for expert in EVERYTHING if expert in self.cache} == cached
        assert {INDEX.expert(number) for number in self.cache.idle.nonzero()[0].tolist()} == self.idle()
        assert self.cache.num_empty == NUM_SLOTS - len(cached)
        assert {expert for expert in EVERYTHING if self.cache.is_ready(expert)} == self.ready
        assert self.cache.num_evictions == self.num_evictions
        assert sum(slot.num_users for slot in self.cache._slots) == len(self.pinned)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_slots_are_rows_of_the_slab() -> None:
    slab = torch.zeros(2, 8, dtype=torch.uint8)
    cache = ExpertCache(slab, INDEX)
    assert (cache.num_slots, cache.expert_bytes) == (2, 8)
    for expert in range(2):
        make_ready(cache, 0, expert).record.fill_(expert + 1)
    assert sorted(slab.sum(dim=1).tolist()) == [8, 16]


def test_a_slot_keeps_the_events_of_its_fill_and_last_use() -> None:
    cache = make_cache()
    slot = reserve(cache, 0, 0)
    filled, used = DoneEvent(), DoneEvent()
    cache.fill(slot, [filled])
    cache.unpin(cache.pin(ExpertId(0, 0)), None)
    assert slot.last_use is DONE
    cache.unpin(cache.pin(ExpertId(0, 0)), used)
    assert slot.filled == [filled]
    assert slot.last_use is used


def test_the_last_use_outlives_the_eviction() -> None:
    # The copy that fills the slot for its next owner has to wait for compute that still reads the last one.
    cache = make_cache(num_slots=1)
    make_ready(cache, 0, 0)
    used = DoneEvent()
    cache.unpin(cache.pin(ExpertId(0, 0)), used)
    cache.evict(ExpertId(0, 0))
    assert reserve(cache, 1, 0).last_use is used


def test_an_expert_pinned_twice_stays_until_both_are_done() -> None:
    cache = make_cache(num_slots=1)
    make_ready(cache, 0, 0)
    first, second = cache.pin(ExpertId(0, 0)), cache.pin(ExpertId(0, 0))
    cache.unpin(first, DONE)
    with pytest.raises(AssertionError):
        cache.evict(ExpertId(0, 0))
    cache.unpin(second, DONE)
    cache.evict(ExpertId(0, 0))
    assert cache.num_empty == 1


def test_a_prefetch_was_wasted_only_if_it_was_never_used() -> None:
    cache = make_cache(num_slots=1)
    make_ready(cache, 0, 0, is_prefetch=True)
    cache.unpin(cache.pin(ExpertId(0, 0)), DONE)
    assert not cache.evict(ExpertId(0, 0))
    make_ready(cache, 0, 1, is_prefetch=True)
    cache.unpin(cache.pin(ExpertId(0, 1)), None)  # what is pinned and not read was not used
    assert cache.evict(ExpertId(0, 1))
    make_ready(cache, 0, 2)
    assert not cache.evict(ExpertId(0, 2))
    assert cache.num_evictions == 3


def test_what_failed_to_come_was_no_eviction() -> None:
    cache = make_cache(num_slots=1)
    cache.abandon(reserve(cache, 0, 0, is_prefetch=True))
    assert (cache.num_evictions, cache.num_empty) == (0, 1)


@pytest.mark.parametrize(
    "misuse",
    [
        pytest.param(lambda cache: reserve(cache, 0, 0), id="reserve for a resident expert"),
        pytest.param(lambda cache: reserve(cache, 0, 1), id="reserve for a loading expert"),
        pytest.param(lambda cache: cache.fill(cache._by_owner[ExpertId(0, 0)], [DONE]), id="fill a READY slot"),
        pytest.param(lambda cache: cache.abandon(cache._by_owner[ExpertId(0, 0)]), id="abandon a READY slot"),
        pytest.param(lambda cache: cache.pin(ExpertId(0, 1)), id="pin a LOADING slot"),
        pytest.param(lambda cache: cache.evict(ExpertId(0, 1)), id="evict from a LOADING slot"),
        pytest.param(lambda cache: cache.evict(ExpertId(0, 2)), id="evict from a slot in use"),
        pytest.param(lambda cache: cache.unpin(cache._by_owner[ExpertId(0, 0)], DONE), id="unpin what is not pinned"),
        pytest.param(lambda cache: cache.unpin(cache._empty[0], DONE), id="unpin an EMPTY slot"),
    ],
)
def test_misuse_is_an_assertion(misuse: Callable[[ExpertCache], object]) -> None:
    cache = make_cache()
    make_ready(cache, 0, 0)
    reserve(cache, 0, 1)
    make_ready(cache, 0, 2)
    cache.pin(ExpertId(0, 2))
    before = snapshot(cache)
    with pytest.raises(AssertionError):
        misuse(cache)
    assert snapshot(cache) == before
    cache.check_integrity()


def corrupt_owner(cache: ExpertCache) -> None:
    cache._by_owner[ExpertId(0, 0)].owner = ExpertId(2, 2)


def corrupt_map(cache: ExpertCache) -> None:
    cache._by_owner[ExpertId(0, 0)] = cache._by_owner[ExpertId(0, 1)]


def lose_an_owner(cache: ExpertCache) -> None:
    del cache._by_owner[ExpertId(0, 0)]


def own_the_same_expert_twice(cache: ExpertCache) -> None:
    slot = cache._empty.pop()
    slot.state, slot.owner = SlotState.READY, ExpertId(0, 0)


def lose_an_empty_slot(cache: ExpertCache) -> None:
    cache._empty.pop()


def list_an_empty_slot_twice(cache: ExpertCache) -> None:
    cache._empty[0] = cache._empty[1]


def offer_a_ready_slot_as_empty(cache: ExpertCache) -> None:
    cache._empty[0] = cache._by_owner[ExpertId(0, 0)]


def use_a_loading_slot(cache: ExpertCache) -> None:
    cache._by_owner[ExpertId(0, 1)].num_users = 1


def have_negative_users(cache: ExpertCache) -> None:
    cache._by_owner[ExpertId(0, 0)].num_users = -1


def offer_a_loading_expert_for_eviction(cache: ExpertCache) -> None:
    cache.idle[INDEX.number(ExpertId(0, 1))] = True


def forget_that_an_expert_is_idle(cache: ExpertCache) -> None:
    cache.idle[INDEX.number(ExpertId(0, 0))] = False


def own_nothing(cache: ExpertCache) -> None:
    cache._by_owner[ExpertId(0, 0)].owner = None


@pytest.mark.parametrize(
    "corrupt",
    [
        corrupt_owner,
        corrupt_map,
        lose_an_owner,
        own_the_same_expert_twice,
        lose_an_empty_slot,
        list_an_empty_slot_twice,
        offer_a_ready_slot_as_empty,
        use_a_loading_slot,
        have_negative_users,
        offer_a_loading_expert_for_eviction,
        forget_that_an_expert_is_idle,
        own_nothing,
    ],
)
def test_check_integrity_finds_what_is_broken(corrupt: Callable[[ExpertCache], None]) -> None:
    cache = make_cache()
    make_ready(cache, 0, 0)
    reserve(cache, 0, 1)
    cache.check_integrity()
    corrupt(cache)
    with pytest.raises(AssertionError):
        cache.check_integrity()
