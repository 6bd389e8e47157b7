"""Whatever is planned, visited, moved or lost, and in whatever order: the schedule against what it should decide."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.device import DONE
from engine.experts.cache import ExpertCache, Slot, SlotState
from engine.experts.layout import ExpertId
from engine.experts.policy import DecayedFrequency, EvictionPolicy, ExpertIndex, Mask, PerLayerLru
from engine.experts.schedule import Piece, TransferSchedule

NUM_LAYERS, NUM_EXPERTS, EXPERT_BYTES = 3, 4, 8
INDEX = ExpertIndex([NUM_EXPERTS] * NUM_LAYERS)
ERROR = OSError("no such sector")


class WatchedPolicy:
    """Also notes which experts it was told to have slots."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.known: set[ExpertId] = set()
        self.visits: list[tuple[int, dict[int, Sequence[int]], int]] = []

    def insert(self, expert: ExpertId) -> None:
        assert expert not in self.known
        self.known.add(expert)
        self.policy.insert(expert)

    def remove(self, expert: ExpertId) -> None:
        self.known.remove(expert)
        self.policy.remove(expert)

    def visit(self, layer: int, rows: Mapping[int, Sequence[int]], num_tokens: int) -> None:
        self.visits.append((layer, dict(rows), num_tokens))
        self.policy.visit(layer, rows, num_tokens)

    def victim(self, layer: int, evictable: Mask) -> ExpertId | None:
        return self.policy.victim(layer, evictable)


@st.composite
def plans(draw: st.DrawFn) -> list[ExpertId]:
    """Layer by layer, in any order within one."""
    experts = st.lists(st.integers(0, NUM_EXPERTS - 1), unique=True, max_size=3)
    return [ExpertId(layer, expert) for layer in range(draw(st.integers(0, 2)), NUM_LAYERS) for expert in draw(experts)]


wanted = st.lists(st.integers(0, NUM_EXPERTS - 1), unique=True, min_size=1)


@dataclass
class Progress:
    """Of an expert that is on its way."""

    slot: Slot
    is_prefetch: bool
    num_begun_bytes: int = 0
    num_in_flight: int = 0
    has_failed: bool = False

    @property
    def has_more(self) -> bool:
        return not self.has_failed and self.num_begun_bytes < EXPERT_BYTES


def piece_bytes(expert: ExpertId) -> int:
    """Some come whole, and some in pieces of which the last is smaller."""
    return EXPERT_BYTES if expert.expert == 0 else 3


class ScheduleMachine(RuleBasedStateMachine):
    """Does to a schedule whatever may be done to it, and knows by itself what it has to decide."""

    @initialize(num_slots=st.integers(1, 4), is_lru=st.booleans())
    def begin(self, num_slots: int, is_lru: bool) -> None:
        self.num_slots = num_slots
        self.policy = WatchedPolicy(PerLayerLru(INDEX, num_slots) if is_lru else DecayedFrequency(INDEX))
        self.cache = ExpertCache(torch.zeros(num_slots, EXPERT_BYTES, dtype=torch.uint8), INDEX)
        self.schedule = TransferSchedule(self.cache, self.policy, INDEX, piece_bytes)
        self.ranks: dict[ExpertId, int] = {}
        """Of the plan, without the layers that have been visited."""
        self.was_idle: set[ExpertId] = set()
        """Before the piece began that is looked at."""
        self.given_up: set[ExpertId] = set()
        """Of the plan, those whose transfer failed: they are not tried again before somebody asks for them."""
        self.moving: dict[ExpertId, Progress] = {}
        """Since the first piece of each, in that order."""
        self.pieces: list[Piece] = []
        """In flight."""
        self.layer: int | None = None
        """Of the visit."""
        self.demanded: list[ExpertId] = []
        """What the visit waits for and nobody moves yet, in order."""
        self.awaited: set[ExpertId] = set()
        self.arrived: set[ExpertId] = set()
        self.in_use: list[Slot] = []
        self.was_planned: set[ExpertId] = set()
        """Those of the visited layer that the plan knew of."""
        self.failure: OSError | None = None
        self.unused_prefetches: set[ExpertId] = set()
        self.counts: Counter[str] = Counter()

    # What it should see.

    def slots(self) -> dict[ExpertId, Slot]:
        return {slot.owner: slot for slot in self.cache._slots if slot.owner is not None}

    def idle(self) -> set[ExpertId]:
        return {e for e, slot in self.slots().items() if slot.state is SlotState.READY and slot.num_users == 0}

    def to_prefetch(self) -> list[ExpertId]:
        missing = self.ranks.keys() - self.slots().keys() - self.given_up
        return sorted(missing, key=self.ranks.__getitem__)

    # The step loop's side.

    @rule(predicted=plans())
    def plan(self, predicted: list[ExpertId]) -> None:
        """Also in the middle of a visit, for the layers behind it."""
        predicted = [expert for expert in predicted if self.layer is None or expert.layer > self.layer]
        num_missing = self.schedule.plan(predicted)
        assert num_missing == sum(expert not in self.cache for expert in predicted)
        self.ranks = {expert: rank for rank, expert in enumerate(predicted)}
        self.given_up = {expert for expert, progress in self.moving.items() if progress.has_failed}

    @precondition(lambda self: self.layer is None)
    @rule(layer=st.integers(0, NUM_LAYERS - 1), experts=wanted, num_tokens=st.integers(1, 3))
    def begin_visit(self, layer: int, experts: list[int], num_tokens: int) -> None:
        rows = {expert: range(expert % num_tokens + 1) for expert in experts}
        before = self.slots()
        self.schedule.begin_visit(layer, rows, num_tokens)
        assert self.policy.visits[-1] == (layer, rows, num_tokens)
        self.layer, self.failure = layer, None
        self.was_planned = {expert for expert in self.ranks if expert.layer == layer}
        self.ranks = {expert: rank for expert, rank in self.ranks.items() if expert.layer != layer}
        for expert in (ExpertId(layer, number) for number in experts):
            if expert in before and before[expert].state is SlotState.READY:
                self.arrived.add(expert)
                self.counts["hits"] += 1
                continue
            self.awaited.add(expert)
            self.counts["misses"] += 1
            if expert not in before:
                self.demanded.append(expert)

    @precondition(lambda self: self.layer is not None)
    @rule()
    def next_arrival(self) -> None:
        if self.failure is not None and not self.arrived:
            with pytest.raises(OSError, match="no such sector"):
                self.schedule.next_arrival()
            return
        slot = self.schedule.next_arrival()
        assert (slot is None) == (not self.arrived)
        if slot is not None:
            assert slot.owner is not None
            assert slot.num_users == 1
            self.arrived.remove(slot.owner)
            self.in_use.append(slot)

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def end_use(self, data: st.DataObject) -> None:
        self._end_use(data.draw(st.sampled_from(self.in_use)))

    def _end_use(self, slot: Slot) -> None:
        assert slot.owner is not None
        self.in_use.remove(slot)
        self.schedule.end_use(slot, DONE)
        self.counts["used"] += slot.owner in self.unused_prefetches
        self.unused_prefetches.discard(slot.owner)

    @precondition(lambda self: self.layer is not None and not self.in_use)
    @rule()
    def end_visit(self) -> None:
        """Also before everything has come, as where compute fails."""
        self.schedule.end_visit()
        self.layer = None
        self.demanded, self.awaited, self.arrived, self.failure = [], set(), set(), None

    @precondition(lambda self: self.layer is not None and self.failure is None)
    @rule()
    def finish_visit(self) -> None:
        """It ends once transfers are made, whatever else is planned."""
        for _ in range(10 * INDEX.num_experts):
            if self.in_use:
                self._end_use(self.in_use[0])
            elif self.arrived:
                self.next_arrival()
            elif not self.schedule.is_waiting:
                break
            elif self.pieces:
                self._end_piece(self.pieces[0])
                if self.failure is not None:
                    return
            else:
                self.begin_piece()
                assert self.pieces, "the visit would wait for ever"
        assert not self.schedule.is_waiting
        assert not self.awaited
        assert self.schedule.next_arrival() is None
        self.end_visit()

    # The mover's side.

    @rule()
    def begin_piece(self) -> None:
        for expert, progress in list(self.moving.items()):
            if expert not in self.awaited and expert not in self.ranks and not progress.num_in_flight:
                self._remove(expert)  # which nobody needs any more
                self.counts["wasted"] += progress.is_prefetch
        before = {e: slot for e, slot in self.slots().items() if slot.state is SlotState.READY or e in self.moving}
        self.was_idle = self.idle()
        expected = self._most_urgent(before)
        piece = self.schedule.begin_piece()
        lost = before.keys() - self.slots().keys()
        if expected is None:
            assert piece is None
            assert not lost
            return
        assert piece is not None
        assert piece.transfer.expert == expected
        if expected not in self.moving:
            self._begin(piece, lost, has_empty=len(before) < self.num_slots)
        else:
            assert not lost
        progress = self.moving[expected]
        assert piece.offset == progress.num_begun_bytes
        assert piece.num_bytes == min(piece_bytes(expected), EXPERT_BYTES - piece.offset)
        assert progress.slot.state is SlotState.LOADING
        progress.num_begun_bytes += piece.num_bytes
        progress.num_in_flight += 1
        self.pieces.append(piece)
        self.counts["prefetch_bytes" if progress.is_prefetch else "demand_bytes"] += piece.num_bytes

    def _most_urgent(self, before: dict[ExpertId, Slot]) -> ExpertId | None:
        """What the visit waits for, begun or not; then what is planned: what has begun is finished first."""
        idle, has_empty = self.idle(), len(before) < self.num_slots
        begun = [expert for expert, progress in self.moving.items() if progress.has_more]
        for expert in begun:
            if expert in self.awaited:
                return expert
        if self.demanded and (has_empty or idle or self._interruptible()):
            return self.demanded[0]
        for expert in begun:
            if expert in self.ranks:
                return expert
        for expert in self.to_prefetch():
            expendable = set(self.schedule._plan.expendable) & self.ranks.keys() & idle
            gives_way = any(self.ranks[other] > self.ranks[expert] for other in expendable)
            return expert if has_empty or idle - self.ranks.keys() or gives_way else None
        return None

    def _interruptible(self) -> list[ExpertId]:
        """Prefetches between two pieces."""
        return [e for e, progress in self.moving.items() if not progress.num_in_flight and e not in self.awaited]

    def _begin(self, piece: Piece, lost: set[ExpertId], has_empty: bool) -> None:
        expert = piece.transfer.expert
        is_demand = expert in self.demanded
        assert len(lost) == (0 if has_empty else 1)
        for victim in lost:
            self._check_victim(victim, expert, is_demand)
        if is_demand:
            assert self.demanded.pop(0) == expert
        is_prefetch = not is_demand or expert in self.was_planned
        self.moving[expert] = Progress(piece.transfer.slot, is_prefetch)
        if is_prefetch:
            self.unused_prefetches.add(expert)
        else:
            self.counts["demand_fetches"] += 1

    def _check_victim(self, victim: ExpertId, expert: ExpertId, is_demand: bool) -> None:
        """As before the piece began: none that is on its way but between two pieces, in use or awaited."""
        if victim in self.moving:
            assert is_demand
            assert not self.was_idle
            assert victim == self._interruptible()[-1]
            self._remove(victim)
            self.given_up.discard(victim)  # in its turn it is moved again
            return
        idle, unplanned = self.was_idle, self.was_idle - self.ranks.keys()
        assert victim in idle
        if unplanned:
            assert victim in unplanned
        elif is_demand:
            assert self.ranks[victim] == max(self.ranks[other] for other in idle)
        else:
            assert self.ranks[victim] > self.ranks[expert]
        self.counts["evictions"] += 1
        self.counts["wasted"] += victim in self.unused_prefetches
        self.unused_prefetches.discard(victim)

    def _remove(self, expert: ExpertId) -> None:
        """It is no longer on its way, and has no slot."""
        del self.moving[expert]
        self.unused_prefetches.discard(expert)

    @rule()
    def drain(self) -> None:
        """As a fast link does."""
        for _ in range(3 * INDEX.num_experts):
            self.begin_piece()
            while self.pieces:
                self._end_piece(self.pieces[0])

    @precondition(lambda self: self.pieces)
    @rule(data=st.data())
    def end_piece(self, data: st.DataObject) -> None:
        self._end_piece(data.draw(st.sampled_from(self.pieces)))

    def _end_piece(self, piece: Piece) -> None:
        expert = piece.transfer.expert
        progress = self.moving[expert]
        self.pieces.remove(piece)
        self.schedule.end_piece(piece, DONE)
        progress.num_in_flight -= 1
        if progress.num_in_flight or progress.has_more:
            return
        if progress.has_failed:
            self._fail(expert)
            return
        del self.moving[expert]
        if expert in self.awaited:
            self.awaited.remove(expert)
            self.arrived.add(expert)

    @precondition(lambda self: self.pieces)
    @rule(data=st.data())
    def fail_piece(self, data: st.DataObject) -> None:
        piece = data.draw(st.sampled_from(self.pieces))
        expert = piece.transfer.expert
        progress = self.moving[expert]
        self.pieces.remove(piece)
        assert self.schedule.fail_piece(piece, ERROR) == (expert in self.awaited)
        progress.has_failed = True
        progress.num_in_flight -= 1
        self.given_up.add(expert)
        if expert in self.awaited:
            self.failure = ERROR
        if not progress.num_in_flight:
            self._fail(expert)

    def _fail(self, expert: ExpertId) -> None:
        """Nothing of it is in flight any more; a visit that waits for it must not do so for ever."""
        self._remove(expert)
        if expert in self.awaited:
            self.failure = ERROR

    # What is always true.

    @invariant()
    def slots_are_as_expected(self) -> None:
        self.cache.check_integrity()
        slots = self.slots()
        assert self.policy.known == slots.keys()
        loading = {expert for expert, slot in slots.items() if slot.state is SlotState.LOADING}
        assert loading == self.moving.keys()
        pinned = {expert for expert, slot in slots.items() if slot.num_users}
        assert pinned == self.arrived | {slot.owner for slot in self.in_use}
        assert self.schedule.is_waiting == bool(self.awaited)

    @invariant()
    def counters_are_as_expected(self) -> None:
        schedule = self.schedule
        assert (schedule.num_hits, schedule.num_misses) == (self.counts["hits"], self.counts["misses"])
        assert schedule.num_prefetches_used == self.counts["used"]
        assert schedule.num_demand_fetches == self.counts["demand_fetches"]
        assert (schedule.demand_bytes, schedule.prefetch_bytes) == (
            self.counts["demand_bytes"],
            self.counts["prefetch_bytes"],
        )
        assert self.cache.num_evictions == self.counts["evictions"]
        assert schedule.num_prefetches_wasted == self.counts["wasted"]


TestScheduleMachine = ScheduleMachine.TestCase
TestScheduleMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def schedule_with(num_slots: int) -> TransferSchedule:
    cache = ExpertCache(torch.zeros(num_slots, EXPERT_BYTES, dtype=torch.uint8), INDEX)
    return TransferSchedule(cache, DecayedFrequency(INDEX), INDEX, piece_bytes)


def begun(schedule: TransferSchedule) -> Piece:
    piece = schedule.begin_piece()
    assert piece is not None
    return piece


def test_a_visit_does_not_wait_for_a_transfer_that_has_failed_already() -> None:
    """Whose other piece is still in flight, when the visit joins it."""
    schedule = schedule_with(num_slots=2)
    schedule.plan([ExpertId(0, 1)])
    first, second = begun(schedule), begun(schedule)
    assert not schedule.fail_piece(first, ERROR)
    schedule.begin_visit(0, {1: [0]}, 1)
    schedule.end_piece(second, DONE)
    with pytest.raises(OSError, match="no such sector"):
        schedule.next_arrival()


def test_a_demand_overtakes_the_prefetch_that_is_under_way_which_goes_on_afterwards() -> None:
    schedule = schedule_with(num_slots=2)
    schedule.plan([ExpertId(1, 1)])
    schedule.end_piece(begun(schedule), DONE)
    schedule.begin_visit(0, {0: [0]}, 1)
    demand = begun(schedule)
    assert (demand.transfer.expert, demand.offset, demand.num_bytes) == ((0, 0), 0, EXPERT_BYTES)
    rest = [begun(schedule), begun(schedule)]
    assert [(piece.transfer.expert, piece.offset, piece.num_bytes) for piece in rest] == [
        (ExpertId(1, 1), 3, 3),
        (ExpertId(1, 1), 6, 2),
    ]
    assert (schedule.prefetch_bytes, schedule.demand_bytes) == (EXPERT_BYTES, EXPERT_BYTES)


def test_a_prefetch_that_is_half_done_gives_its_slot_to_a_demand_and_comes_again() -> None:
    schedule = schedule_with(num_slots=1)
    schedule.plan([ExpertId(1, 1)])
    schedule.end_piece(begun(schedule), DONE)
    schedule.begin_visit(0, {0: [0]}, 1)
    demand = begun(schedule)
    assert demand.transfer.expert == (0, 0)
    schedule.end_piece(demand, DONE)
    slot = schedule.next_arrival()
    assert slot is not None
    schedule.end_use(slot, DONE)
    schedule.end_visit()
    again = begun(schedule)
    assert (again.transfer.expert, again.offset) == (ExpertId(1, 1), 0)


def test_what_no_plan_needs_any_more_is_given_up_between_two_pieces() -> None:
    schedule = schedule_with(num_slots=1)
    schedule.plan([ExpertId(1, 1)])
    first = begun(schedule)
    schedule.plan([ExpertId(1, 2)])
    assert schedule.begin_piece() is None  # no more of it, and no slot for another one while a piece is in flight
    schedule.end_piece(first, DONE)
    assert begun(schedule).transfer.expert == (1, 2)
    assert schedule.num_prefetches_wasted == 1
