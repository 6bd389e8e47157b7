"""Transfers over a fake store, for the tests of both kinds: without threads and with them."""

from collections.abc import Callable

import torch

from engine.device import DONE, CpuDevice, Event
from engine.experts.cache import ExpertCache, SlotState
from engine.experts.layout import ExpertId
from engine.experts.policy import ExpertIndex, PerLayerLru
from engine.experts.schedule import TransferSchedule
from engine.experts.transfer import ExpertTransfers

EXPERT_BYTES = 16
NUM_LAYERS = 3
NUM_EXPERTS = 6


def mark_of(expert: ExpertId) -> int:
    """What the expert's record is filled with."""
    return 1 + 16 * expert.layer + expert.expert


class FakeStore:
    """Records of one repeated byte. Remembers what was fetched, and fails for what is in `broken`."""

    def __init__(self) -> None:
        self.fetched: list[ExpertId] = []
        self.broken: set[ExpertId] = set()
        self.on_fetch: Callable[[ExpertId], None] = lambda expert: None

    def is_divisible(self, expert: ExpertId) -> bool:
        return True

    def fetch(self, expert: ExpertId, destination: torch.Tensor, offset: int = 0) -> Event:
        self.fetched.append(expert)
        destination.fill_(0xFF)
        self.on_fetch(expert)
        if expert in self.broken:
            raise OSError(f"cannot read {expert.layer}/{expert.expert}")
        destination.fill_(mark_of(expert))
        return DONE

    def close(self) -> None:
        pass


class Bench:
    """Transfers with a fake store, and what was computed."""

    def __init__(self, num_slots: int, piece_bytes: int = EXPERT_BYTES) -> None:
        self.store = FakeStore()
        index = ExpertIndex([NUM_EXPERTS] * NUM_LAYERS)
        self.cache = ExpertCache(torch.zeros(num_slots, EXPERT_BYTES, dtype=torch.uint8), index)
        schedule = TransferSchedule(self.cache, PerLayerLru(index, num_slots), index, lambda expert: piece_bytes)
        self.transfers = ExpertTransfers(schedule, self.store, CpuDevice())
        self.computed: list[tuple[int, int]] = []

    def plan(self, *experts: tuple[int, int]) -> None:
        self.transfers.plan([ExpertId(*expert) for expert in experts])

    def drain(self) -> None:
        """Transfer until there is nothing to do or no slot to do it with."""
        while self.transfers.transfer_next() is not None:
            pass

    def visit(self, layer: int, *experts: int, then: Callable[[int], None] = lambda expert: None) -> None:
        """Visit, with a compute that checks the record, and then does something."""

        def compute(expert: int, record: torch.Tensor) -> None:
            assert record.tolist() == [mark_of(ExpertId(layer, expert))] * EXPERT_BYTES
            self.computed.append((layer, expert))
            then(expert)

        self.transfers.visit(layer, {expert: [0] for expert in experts}, 1, compute)

    @property
    def resident(self) -> set[ExpertId | None]:
        return {slot.owner for slot in self.cache._slots if slot.state is SlotState.READY}

    def check_idle(self) -> None:
        """No invariant is broken, and nothing is left in use or in flight."""
        self.transfers.check_integrity()
        assert all(slot.num_users == 0 for slot in self.cache._slots)
        assert all(slot.state is not SlotState.LOADING for slot in self.cache._slots)
