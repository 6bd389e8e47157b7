"""What is moved next, what leaves for it, and what a visit still waits for.

The step loop says what it will visit (`plan`) and what it visits now (`begin_visit`); whoever moves experts asks for
the most urgent piece of work (`begin_piece`) and tells how it ended. What a visit waits for comes first (demand
fetches), then the plan in its order, each as soon as there is a slot for it. More planned experts than slots is normal:
a slot is free again when its layer has been visited, so the plan streams through.

Experts are moved in pieces, so that a demand need not wait for the prefetch that is under way: that goes on afterwards,
or is given up once no plan needs it any more. So a prefetch costs the link only time in which nothing better was known.

Slots are taken from what no plan needs, by the eviction policy; then from planned experts that have to give way to
earlier ones (`plan_transfers`); and for a demand from the planned expert that is used last.

The schedule is plain data, like the cache that it decides about: it is not thread-safe, moves no bytes, waits for
nothing and knows no clock. `ExpertTransfers` runs it with threads on a device, and the simulator in virtual time.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from engine.device import Event
from engine.experts.cache import ExpertCache, Slot
from engine.experts.layout import ExpertId
from engine.experts.planner import TransferPlan, plan_transfers
from engine.experts.policy import EvictionPolicy, ExpertIndex, Mask


@dataclass(slots=True, eq=False)
class Transfer:
    """An expert on its way into a slot. Mutable; changed only by `TransferSchedule`."""

    expert: ExpertId
    slot: Slot
    is_prefetch: bool
    piece_bytes: int
    offset: int = 0
    """Where the next piece begins."""
    num_in_flight: int = 0
    """Pieces that have begun and not ended."""
    arrivals: list[Event] = field(default_factory=list)
    """The events of the pieces that are enqueued."""
    error: Exception | None = None
    plan_number: int = 0
    """The plan in which it failed, if it did."""

    @property
    def has_more(self) -> bool:
        return self.error is None and self.offset < self.slot.record.nbytes


class Piece(NamedTuple):
    """A part of an expert's record, to be moved into the same part of its slot."""

    transfer: Transfer
    offset: int
    num_bytes: int


class TransferSchedule:
    """Mutable; counts what it decides."""

    def __init__(
        self,
        cache: ExpertCache,
        policy: EvictionPolicy,
        index: ExpertIndex,
        piece_bytes: Callable[[ExpertId], int],
    ) -> None:
        """`piece_bytes(expert)` says how much of the expert is moved at once."""
        self.cache = cache
        self._policy = policy
        self._index = index
        self._piece_bytes = piece_bytes
        self._plan = TransferPlan({}, [])
        self._plan_number = 0
        self._planned: Mask = np.zeros(index.num_experts, np.bool_)
        """The experts of the plan, which are not the policy's to evict."""
        self._prefetches: list[tuple[int, ExpertId]] = []
        """A heap of (rank, expert) with every planned expert that is not cached, and perhaps others."""
        self._demands: deque[tuple[ExpertId, bool]] = deque()
        """What the visit waits for and nobody has begun to move, and whether it was planned."""
        self._transfers: list[Transfer] = []
        """Those that have begun, in that order."""
        self._awaited: set[ExpertId] = set()
        self._arrived: deque[Slot] = deque()
        self._failure: Exception | None = None
        self.num_hits = 0
        self.num_misses = 0
        self.num_prefetches_used = 0
        self.num_prefetches_wasted = 0
        self.num_demand_fetches = 0
        self.prefetch_bytes = 0
        self.demand_bytes = 0

    @property
    def moved_bytes(self) -> int:
        """Of all pieces that have begun."""
        return self.prefetch_bytes + self.demand_bytes

    # The step loop's side.

    def plan(self, predicted: Sequence[ExpertId]) -> int:
        """Replace the plan: experts in the order in which they will be visited; how many of them have to be moved."""
        num_planned = sum(expert in self.cache for expert in predicted)
        self._plan = plan_transfers(
            predicted, self.cache.__contains__, self.cache.num_slots, self.cache.num_slots - num_planned
        )
        self._plan_number += 1
        self._planned[:] = False
        self._planned[[self._index.number(expert) for expert in self._plan.ranks]] = True
        self._prefetches = [(rank, expert) for expert, rank in self._plan.ranks.items() if expert not in self.cache]
        heapify(self._prefetches)
        return len(self._prefetches)

    def begin_visit(self, layer: int, rows: Mapping[int, Sequence[int]], num_tokens: int) -> None:
        """The step loop needs these experts of the layer, each for the tokens at `rows` of the pass.

        `next_arrival` hands them out: resident ones first, then the others as they come. The layer is out of the plan.
        """
        self._failure = None
        self._policy.visit(layer, rows, num_tokens)
        planned = self._planned[self._index.layer(layer)]
        was_planned = planned.copy()
        planned[:] = False
        for expert in (ExpertId(layer, expert) for expert in rows):
            if self.cache.is_ready(expert):
                self._arrived.append(self.cache.pin(expert))
                continue
            self._awaited.add(expert)
            if expert not in self.cache:  # else a prefetch of it is under way, which the visit joins
                self._demands.append((expert, bool(was_planned[expert.expert])))
        self.num_hits += len(self._arrived)
        self.num_misses += len(self._awaited)

    def next_arrival(self) -> Slot | None:
        """A slot of the visit that is READY, pinned until it is handed to `end_use`; None where there is none now.

        Raises the error that an expert of the visit failed with.
        """
        if self._arrived:
            return self._arrived.popleft()
        if self._awaited and self._failure is not None:
            raise self._failure
        return None

    @property
    def is_waiting(self) -> bool:
        """Whether experts of the visit are still to come, after those that `next_arrival` hands out."""
        return bool(self._awaited)

    def end_use(self, slot: Slot, last_use: Event) -> None:
        """The visit is done with the slot; `last_use` marks the end of the compute that reads it."""
        self.num_prefetches_used += slot.is_unused_prefetch
        self.cache.unpin(slot, last_use)

    def end_visit(self) -> None:
        """What the visit did not use is free again, and nothing is waited for."""
        for slot in self._arrived:
            self.cache.unpin(slot, None)
        self._arrived.clear()
        self._awaited.clear()
        self._demands.clear()

    # The mover's side.

    def begin_piece(self) -> Piece | None:
        """The most urgent piece of work; None where there is nothing to move, or no slot for it."""
        self._give_up_useless()
        transfer = self._first(is_awaited=True) or self._begin_demand()
        transfer = transfer or self._first(is_awaited=False) or self._begin_prefetch()
        if transfer is None:
            return None
        piece = Piece(
            transfer, transfer.offset, min(transfer.piece_bytes, transfer.slot.record.nbytes - transfer.offset)
        )
        transfer.offset += piece.num_bytes
        transfer.num_in_flight += 1
        if transfer.is_prefetch:
            self.prefetch_bytes += piece.num_bytes
        else:
            self.demand_bytes += piece.num_bytes
        return piece

    def end_piece(self, piece: Piece, arrival: Event) -> None:
        """The piece's copy is enqueued, and done with `arrival`.

        With the last one, whoever waits for the expert gets it, so no other fetch can take its slot.
        """
        transfer = piece.transfer
        transfer.num_in_flight -= 1
        transfer.arrivals.append(arrival)
        if transfer.num_in_flight or transfer.has_more:
            return
        if transfer.error is not None:
            self._give_up(transfer)
            if self._plan_number > transfer.plan_number:  # which could not ask for it while it failed
                self._plan_again(transfer.expert)
            if transfer.expert in self._awaited:  # by a visit that has joined it since it failed
                self._failure = transfer.error
            return
        self._transfers.remove(transfer)
        self.cache.fill(transfer.slot, transfer.arrivals)
        if transfer.expert in self._awaited:
            self._awaited.remove(transfer.expert)
            self._arrived.append(self.cache.pin(transfer.expert))

    def fail_piece(self, piece: Piece, error: Exception) -> bool:
        """The piece did not come, and so the expert will not; whether the visit fails with it."""
        transfer = piece.transfer
        transfer.num_in_flight -= 1
        transfer.error, transfer.plan_number = error, self._plan_number
        if not transfer.num_in_flight:
            self._give_up(transfer)
        is_awaited = transfer.expert in self._awaited
        if is_awaited:
            self._failure = error
        return is_awaited

    def _first(self, is_awaited: bool) -> Transfer | None:
        """The first transfer that has more pieces, of those that the visit waits for, or of those that are planned."""
        for transfer in self._transfers:
            if transfer.has_more and (transfer.expert in self._awaited) == is_awaited and self._is_needed(transfer):
                return transfer
        return None

    def _begin_demand(self) -> Transfer | None:
        if not self._demands:
            return None
        expert, was_planned = self._demands[0]
        if not self._make_room(expert, rank=None):
            return None
        self._demands.popleft()
        self.num_demand_fetches += not was_planned
        return self._begin(expert, is_prefetch=was_planned)

    def _begin_prefetch(self) -> Transfer | None:
        while self._prefetches and not self._is_to_prefetch(self._prefetches[0][1]):
            heappop(self._prefetches)
        if not self._prefetches:
            return None
        rank, expert = self._prefetches[0]
        if not self._make_room(expert, rank):
            return None
        heappop(self._prefetches)
        return self._begin(expert, is_prefetch=True)

    def _begin(self, expert: ExpertId, is_prefetch: bool) -> Transfer:
        transfer = Transfer(expert, self.cache.reserve(expert, is_prefetch), is_prefetch, self._piece_bytes(expert))
        self._policy.insert(expert)
        self._transfers.append(transfer)
        return transfer

    def _is_to_prefetch(self, expert: ExpertId) -> bool:
        return bool(self._planned[self._index.number(expert)]) and expert not in self.cache

    def _give_up_useless(self) -> None:
        """Transfers between two pieces that neither a plan nor a visit needs any more."""
        for transfer in list(self._transfers):
            if not self._is_needed(transfer) and not transfer.num_in_flight:
                self.num_prefetches_wasted += transfer.is_prefetch
                self._give_up(transfer)

    def _is_needed(self, transfer: Transfer) -> bool:
        return transfer.expert in self._awaited or bool(self._planned[self._index.number(transfer.expert)])

    def _give_up(self, transfer: Transfer) -> None:
        self._transfers.remove(transfer)
        self._policy.remove(transfer.expert)
        self.cache.abandon(transfer.slot)

    def _make_room(self, expert: ExpertId, rank: int | None) -> bool:
        """Empty a slot for the expert unless there is an empty one; whether there is one now.

        `rank` is its place in the plan; None where it is needed at once.
        """
        if self.cache.num_empty:
            return True
        victim = self._policy.victim(expert.layer, self.cache.idle & ~self._planned)
        if victim is None:
            victim = self._furthest_planned() if rank is None else self._expendable_after(rank)
        if victim is None:
            return rank is None and self._interrupt_prefetch()
        self.num_prefetches_wasted += self.cache.evict(victim)
        self._policy.remove(victim)
        self._plan_again(victim)
        return True

    def _expendable_after(self, rank: int) -> ExpertId | None:
        """The planned expert that is used last of those that may go; none that is used before what takes its slot."""
        expendable = self._plan.expendable
        candidates = (expert for expert in expendable if self._is_idle_and_planned(expert))
        victim = next(candidates, None)
        return victim if victim is not None and self._plan.ranks[victim] > rank else None

    def _furthest_planned(self) -> ExpertId | None:
        idle = filter(self._is_idle_and_planned, self._plan.ranks)
        return max(idle, key=self._plan.ranks.__getitem__, default=None)

    def _is_idle_and_planned(self, expert: ExpertId) -> bool:
        number = self._index.number(expert)
        return bool(self.cache.idle[number] and self._planned[number])

    def _interrupt_prefetch(self) -> bool:
        """Give up the last prefetch that is between two pieces, for its slot; whether there is one."""
        between = [t for t in self._transfers if not t.num_in_flight and t.expert not in self._awaited]
        if not between:
            return False
        self._give_up(between[-1])
        self._plan_again(between[-1].expert)
        return True

    def _plan_again(self, expert: ExpertId) -> None:
        """What has lost its slot is moved again in its turn, if it is planned."""
        if self._planned[self._index.number(expert)]:
            heappush(self._prefetches, (self._plan.ranks[expert], expert))
