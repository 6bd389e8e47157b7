"""Slots: the device memory that full-precision experts are moved into.

                reserve                 fill                  pin / unpin
    EMPTY  ---------------->  LOADING  ------>  READY  <------------------> READY, in use
      ^                          |               |
      +------- abandon ----------+               +---- reserve for another expert (evict)

LOADING slots and slots in use are never evicted. A slot becomes READY when the copy that fills it has been *enqueued*:
whoever reads the slot first makes compute wait for `slot.filled`, and whoever overwrites it first makes the copy queue
wait for `slot.last_use`. Experts are read-only, so eviction copies nothing.

The cache is plain data: it is not thread-safe, moves no bytes and waits for nothing; `ExpertTransfers` does that, under
its lock.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from engine.device import DONE, Event
from engine.experts.layout import ExpertId
from engine.experts.policy import EvictionPolicy


class SlotState(Enum):
    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"


@dataclass(slots=True, eq=False)
class Slot:
    """Mutable; changed only by `ExpertCache`."""

    index: int
    record: torch.Tensor
    """uint8 [expert_bytes], a row of the slab."""
    state: SlotState = SlotState.EMPTY
    owner: ExpertId | None = None
    generation: int = 0
    """How often the slot has been given to an expert."""
    num_users: int = 0
    filled: Event = DONE
    last_use: Event = DONE
    is_unused_prefetch: bool = False


class ExpertCache:
    """Slots over one slab of device memory, and which expert is in which."""

    def __init__(self, slab: torch.Tensor, policy: EvictionPolicy) -> None:
        """`slab`: uint8 [num_slots, expert_bytes]; `num_slots` is at least 1."""
        self._slots = [Slot(index, record) for index, record in enumerate(slab)]
        self._empty = list(reversed(self._slots))
        self._by_owner: dict[ExpertId, Slot] = {}
        self._policy = policy
        self.num_evictions = 0
        self.num_prefetches_wasted = 0

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def __contains__(self, expert: ExpertId) -> bool:
        """Whether the expert has a slot, READY or LOADING."""
        return expert in self._by_owner

    def is_ready(self, expert: ExpertId) -> bool:
        slot = self._by_owner.get(expert)
        return slot is not None and slot.state is SlotState.READY

    def reserve(
        self, expert: ExpertId, is_prefetch: bool, planned: Mapping[ExpertId, int], is_urgent: bool
    ) -> Slot | None:
        """Give the expert a slot, which becomes LOADING; None, and nothing changes, where no slot can be had now.

        Planned experts (with the rank in which they will be used) are kept; only where there is nothing else, an urgent
        fetch takes the slot of the one that is used last. The expert must not have a slot yet.
        """
        assert expert not in self._by_owner
        slot = self._take_slot(expert, planned, is_urgent)
        if slot is None:
            return None
        slot.state = SlotState.LOADING
        slot.owner = expert
        slot.generation += 1
        slot.is_unused_prefetch = is_prefetch
        self._by_owner[expert] = slot
        self._policy.insert(expert)
        return slot

    def fill(self, slot: Slot, filled: Event) -> None:
        """LOADING -> READY: the copy is enqueued and done when `filled` is."""
        assert slot.state is SlotState.LOADING
        slot.state = SlotState.READY
        slot.filled = filled

    def abandon(self, slot: Slot) -> None:
        """LOADING -> EMPTY: the copy failed."""
        assert slot.state is SlotState.LOADING
        self._vacate(slot)
        self._empty.append(slot)

    def pin(self, expert: ExpertId) -> Slot:
        """Protect a READY expert from eviction until `unpin`."""
        slot = self._by_owner[expert]
        assert slot.state is SlotState.READY
        slot.num_users += 1
        return slot

    def unpin(self, slot: Slot, last_use: Event | None) -> None:
        """Undo one `pin`; `last_use` marks the end of the compute that read the slot, None where none did."""
        assert slot.owner is not None
        assert slot.num_users > 0
        slot.num_users -= 1
        if last_use is not None:
            slot.last_use = last_use
            slot.is_unused_prefetch = False
            self._policy.touch(slot.owner)

    def check_integrity(self) -> None:
        """Raise `AssertionError` where an invariant of the slots is broken."""
        owned = [slot for slot in self._slots if slot.state is not SlotState.EMPTY]
        assert {slot.owner: slot.index for slot in owned} == {e: slot.index for e, slot in self._by_owner.items()}
        assert len(owned) == len(self._by_owner)
        assert len(self._empty) + len(owned) == len(self._slots)
        for slot in self._slots:
            assert slot.num_users >= 0
            assert slot.num_users == 0 or slot.state is SlotState.READY
            assert (slot.owner is None) == (slot.state is SlotState.EMPTY)
            assert (slot in self._empty) == (slot.state is SlotState.EMPTY)

    def _take_slot(self, expert: ExpertId, planned: Mapping[ExpertId, int], is_urgent: bool) -> Slot | None:
        if self._empty:
            return self._empty.pop()
        victim = self._policy.victim(expert.layer, self._evictable_unless(planned))
        if victim is None and is_urgent:
            idle = [other for other in planned if self._evictable_unless({})(other)]
            victim = max(idle, key=planned.__getitem__, default=None)
        if victim is None:
            return None
        slot = self._by_owner[victim]
        self.num_evictions += 1
        self.num_prefetches_wasted += slot.is_unused_prefetch
        self._vacate(slot)
        return slot

    def _evictable_unless(self, planned: Mapping[ExpertId, int]) -> Callable[[ExpertId], bool]:
        def evictable(expert: ExpertId) -> bool:
            slot = self._by_owner.get(expert)
            idle = slot is not None and slot.state is SlotState.READY and slot.num_users == 0
            return idle and expert not in planned

        return evictable

    def _vacate(self, slot: Slot) -> None:
        assert slot.owner is not None
        del self._by_owner[slot.owner]
        self._policy.remove(slot.owner)
        slot.state = SlotState.EMPTY
        slot.owner = None
        slot.is_unused_prefetch = False
