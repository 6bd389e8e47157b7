"""Where the full-precision experts live while they are not on the device."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Protocol, Self

import torch

from engine.device import DONE, Device, Event
from engine.experts.layout import ExpertId, ExpertLayout
from engine.experts.records import RecordFile

NUM_TRANSFERS = 2
"""Records that are moved to the device at once: the slow tier works on one while the other is handed over."""

NUM_LOADERS = 4
"""Records that are read into host memory at once: some are on their way while others are checked."""


class ExpertStore(Protocol):
    """Read-only source of expert records; safe to call from several threads."""

    def is_divisible(self, expert: ExpertId) -> bool:
        """Whether the expert may be fetched in parts now. What has to be checked as a whole may not at first."""

    def fetch(self, expert: ExpertId, destination: torch.Tensor, offset: int = 0) -> Event:
        """Move the expert's record, from `offset` bytes on, into `destination`, uint8 [n] on the device.

        Both are multiples of `BLOCK_BYTES`. May return before the bytes are there; the event is done when they are.
        Raises `OSError` where reading fails and `PackError` where what was read is damaged; then the content of
        `destination` is undefined.
        """

    def close(self) -> None:
        """Release files and memory, once; every fetch has returned, its event is done, and none follows."""


class DiskStore:
    """Experts stay on disk. Closes `records`.

    Where the device's memory is host memory they are read straight into their slots. Elsewhere each goes through a row
    of staging memory, which is read into again only when the copy out of it is done.
    """

    def __init__(self, records: RecordFile, device: Device) -> None:
        self._records = records
        self._device = device
        self._staging: torch.Tensor | None = None  # uint8 [NUM_TRANSFERS, expert_bytes]
        self._free_rows: SimpleQueue[tuple[int, Event]] = SimpleQueue()
        """Rows that no fetch has, each with the event of the last copy out of it."""
        if device.kind != "cpu":
            self._staging = device.empty_host_bytes(NUM_TRANSFERS, records.expert_bytes)
            for row in range(NUM_TRANSFERS):
                self._free_rows.put((row, DONE))

    def is_divisible(self, expert: ExpertId) -> bool:
        return self._records.is_checked(expert)

    def fetch(self, expert: ExpertId, destination: torch.Tensor, offset: int = 0) -> Event:
        if self._staging is None:
            self._records.read(expert, destination, offset)
            return DONE
        row, copied = self._free_rows.get()
        try:
            copied.synchronize()
            staged = self._staging[row, : len(destination)]
            self._records.read(expert, staged, offset)
            copied = self._device.copy(destination, staged)
            return copied
        finally:
            self._free_rows.put((row, copied))

    def close(self) -> None:
        self._records.close()
        if self._staging is not None:
            self._device.release_host_bytes(self._staging)
            self._staging = None


class HostStore:
    """The given experts in host memory, `records` uint8 [len(experts), expert_bytes]; fetched over the copy queue."""

    def __init__(self, device: Device, experts: Sequence[ExpertId], records: torch.Tensor) -> None:
        """`records` are from `device.empty_host_bytes`, and given back to it by `close`."""
        self._device = device
        self._records = records
        self._rows = {expert: row for row, expert in enumerate(experts)}

    @classmethod
    def load(
        cls, device: Device, file: RecordFile, experts: Sequence[ExpertId], on_record: Callable[[int], None]
    ) -> Self:
        """Read the experts, at least one, into (page-locked, on CUDA) memory; `on_record(count)` reports how many.

        Raises `InsufficientMemoryError`, `OSError` and `PackError`; then nothing stays allocated.
        """
        store = cls(device, experts, device.empty_host_bytes(len(experts), file.expert_bytes))
        try:
            with ThreadPoolExecutor(NUM_LOADERS, "load") as threads:
                for count, _ in enumerate(threads.map(file.read, experts, store._records)):
                    on_record(count + 1)
        except BaseException:
            store.close()
            raise
        return store

    def __contains__(self, expert: ExpertId) -> bool:
        return expert in self._rows

    def is_divisible(self, expert: ExpertId) -> bool:
        return True

    def fetch(self, expert: ExpertId, destination: torch.Tensor, offset: int = 0) -> Event:
        return self._device.copy(destination, self._records[self._rows[expert], offset : offset + len(destination)])

    def close(self) -> None:
        self._device.release_host_bytes(self._records)
        del self._records


class TieredStore:
    """Some experts in host memory, the others on disk. Closes both stores."""

    def __init__(self, host: HostStore, disk: DiskStore) -> None:
        self._host = host
        self._disk = disk

    def is_divisible(self, expert: ExpertId) -> bool:
        return self._tier(expert).is_divisible(expert)

    def fetch(self, expert: ExpertId, destination: torch.Tensor, offset: int = 0) -> Event:
        return self._tier(expert).fetch(expert, destination, offset)

    def _tier(self, expert: ExpertId) -> HostStore | DiskStore:
        return self._host if expert in self._host else self._disk

    def close(self) -> None:
        try:
            self._host.close()
        finally:
            self._disk.close()


def host_experts(layout: ExpertLayout, num_experts: int) -> list[ExpertId]:
    """Which experts go to host memory where `num_experts` fit: evenly over layers, so that none is on disk alone."""
    return sorted(layout.experts(), key=lambda expert: (expert.expert, expert.layer))[:num_experts]
