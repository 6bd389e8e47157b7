"""Where the full-precision experts live while they are not on the device."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from engine.device import DONE, Device, Event
from engine.errors import PackError
from engine.experts.layout import ExpertId, ExpertLayout

logger = logging.getLogger(__name__)


class ExpertStore(Protocol):
    """Read-only source of expert records; safe to call from several threads."""

    def fetch(self, expert: ExpertId, destination: torch.Tensor) -> Event:
        """Move the expert's record into `destination`, uint8 [expert_bytes] on the device.

        May return before the bytes are there; the event is done when they are. Raises `OSError` where reading fails;
        then the content of `destination` is undefined.
        """

    def close(self) -> None:
        """Release files and memory; no fetch may be running or follow."""


class RecordFile:
    """The file of all records, in the order of `ExpertLayout.experts()`; read past the page cache.

    A cached read would make the slow tier look fast and use memory that the budget does not show. Where the file
    system refuses direct I/O, each read drops what it left in the page cache.
    """

    def __init__(self, path: Path, layout: ExpertLayout) -> None:
        self._layout = layout
        self._expert_bytes = layout.expert_bytes
        size, expected = path.stat().st_size, layout.num_experts * layout.expert_bytes
        if size != expected:
            raise PackError(
                f"{path} has {size} bytes instead of {expected}; delete its directory to pack the model anew."
            )
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            self._direct = True
        except OSError:
            self._fd = os.open(path, os.O_RDONLY)
            self._direct = False
            logger.warning("%s does not allow direct I/O; reading through the page cache and dropping it", path)

    def read(self, expert: ExpertId, destination: torch.Tensor) -> None:
        """Fill `destination`, uint8 [expert_bytes] in host memory and aligned to a page. Raises `OSError`."""
        offset = self._layout.record_index(expert) * self._expert_bytes
        buffer = destination.numpy().data
        done = 0
        while done < self._expert_bytes:
            count = os.preadv(self._fd, [buffer[done:]], offset + done)
            if count == 0:
                raise OSError(f"expert {expert} ends after {done} of {self._expert_bytes} bytes")
            done += count
        if not self._direct:
            os.posix_fadvise(self._fd, offset, self._expert_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class DiskStore:
    """Experts stay on disk and are read straight into their slots; for devices whose memory is host memory."""

    def __init__(self, records: RecordFile) -> None:
        self._records = records

    def fetch(self, expert: ExpertId, destination: torch.Tensor) -> Event:
        self._records.read(expert, destination)
        return DONE

    def close(self) -> None:
        self._records.close()


class HostStore:
    """Experts in host memory, `records` uint8 [num_experts, expert_bytes]; fetched over the device's copy queue."""

    def __init__(self, device: Device, layout: ExpertLayout, records: torch.Tensor) -> None:
        self._device = device
        self._layout = layout
        self._records = records

    @classmethod
    def load(
        cls, device: Device, layout: ExpertLayout, file: RecordFile, on_record: Callable[[int], None]
    ) -> "HostStore":
        """Read all records into (page-locked, on CUDA) memory; `on_record(count)` reports how many are there."""
        records = device.empty_host_bytes(layout.num_experts, layout.expert_bytes)
        for index, expert in enumerate(layout.experts()):
            file.read(expert, records[index])
            on_record(index + 1)
        return cls(device, layout, records)

    def fetch(self, expert: ExpertId, destination: torch.Tensor) -> Event:
        return self._device.copy(destination, self._records[self._layout.record_index(expert)])

    def close(self) -> None:
        self._records = self._records[:0]
