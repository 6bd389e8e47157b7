"""Slots: the device memory that full-precision experts are moved into.

                reserve                 fill                  pin / unpin
    EMPTY  ---------------->  LOADING  ------>  READY  <------------------> READY, in use
      ^                          |               |
      +-------- abandon ---------+---------------+---- evict

LOADING slots and slots in use are never evicted. A slot becomes READY when the copy that fills it has been *enqueued*:
whoever reads the slot first makes compute wait for `slot.filled`, and whoever overwrites it first makes the copy queue
wait for `slot.last_use`. Experts are read-only, so eviction copies nothing.

The cache is plain data: it is not thread-safe, moves no bytes, waits for nothing and chooses nothing; that is done by
`TransferSchedule`, under the lock of `ExpertTransfers`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from engine.device import DONE, Event
from engine.experts.layout import ExpertId
from engine.experts.policy import ExpertIndex, Mask


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
    filled: Sequence[Event] = ()
    last_use: Event = DONE
    is_unused_prefetch: bool = False


class ExpertCache:
    """Slots over one slab of device memory, and which expert is in which."""

    def __init__(self, slab: torch.Tensor, index: ExpertIndex) -> None:
        """`slab`: uint8 [num_slots, expert_bytes]; `num_slots` is at least 1."""
        self._slots = [Slot(number, record) for number, record in enumerate(slab)]
        self._empty = list(reversed(self._slots))
        self._by_owner: dict[ExpertId, Slot] = {}
        self._index = index
        self._idle: Mask = np.zeros(index.num_experts, np.bool_)
        self.num_evictions = 0

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def expert_bytes(self) -> int:
        return self._slots[0].record.nbytes

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    @property
    def idle(self) -> Mask:
        """[num_experts]: which experts may be evicted, being READY and not in use. Not to be changed or kept."""
        return self._idle

    def __contains__(self, expert: ExpertId) -> bool:
        """Whether the expert has a slot, READY or LOADING."""
        return expert in self._by_owner

    def is_ready(self, expert: ExpertId) -> bool:
        slot = self._by_owner.get(expert)
        return slot is not None and slot.state is SlotState.READY

    def reserve(self, expert: ExpertId, is_prefetch: bool) -> Slot:
        """EMPTY -> LOADING: give a slot to an expert that has none. There must be an empty one."""
        assert expert not in self._by_owner
        slot = self._empty.pop()
        slot.state = SlotState.LOADING
        slot.owner = expert
        slot.generation += 1
        slot.is_unused_prefetch = is_prefetch
        self._by_owner[expert] = slot
        return slot

    def fill(self, slot: Slot, filled: Sequence[Event]) -> None:
        """LOADING -> READY: the copies are enqueued, and done when all of `filled` are."""
        assert slot.state is SlotState.LOADING
        slot.state = SlotState.READY
        slot.filled = filled
        self._note_idle(slot)

    def abandon(self, slot: Slot) -> None:
        """LOADING -> EMPTY: the copies failed, or were given up."""
        assert slot.state is SlotState.LOADING
        self._vacate(slot)

    def evict(self, expert: ExpertId) -> bool:
        """READY -> EMPTY; the expert must be idle. Whether it was prefetched in vain."""
        slot = self._by_owner[expert]
        assert slot.state is SlotState.READY
        assert slot.num_users == 0
        was_wasted = slot.is_unused_prefetch
        self.num_evictions += 1
        self._idle[self._index.number(expert)] = False
        self._vacate(slot)
        return was_wasted

    def pin(self, expert: ExpertId) -> Slot:
        """Protect a READY expert from eviction until `unpin`."""
        slot = self._by_owner[expert]
        assert slot.state is SlotState.READY
        slot.num_users += 1
        self._note_idle(slot)
        return slot

    def unpin(self, slot: Slot, last_use: Event | None) -> None:
        """Undo one `pin`; `last_use` marks the end of the compute that read the slot, None where none did."""
        assert slot.num_users > 0
        slot.num_users -= 1
        self._note_idle(slot)
        if last_use is not None:
            slot.last_use = last_use
            slot.is_unused_prefetch = False

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
        idle = {slot.owner for slot in owned if slot.state is SlotState.READY and slot.num_users == 0}
        assert {self._index.expert(int(number)) for number in np.flatnonzero(self._idle)} == idle

    def _note_idle(self, slot: Slot) -> None:
        assert slot.owner is not None
        self._idle[self._index.number(slot.owner)] = slot.num_users == 0

    def _vacate(self, slot: Slot) -> None:
        assert slot.owner is not None
        del self._by_owner[slot.owner]
        slot.state = SlotState.EMPTY
        slot.owner = None
        slot.is_unused_prefetch = False
        self._empty.append(slot)
