"""The device: where tensors live and in which order work on them runs. The only place that says `torch.cuda`.

Two queues of work exist. The *compute* queue runs the model and belongs to the thread of the step loop. The *copy*
queue moves experts and belongs to the transfer threads. They are ordered against each other only by events:

- a copy into a slot waits for the event that marks the slot's last use by compute (`copy_waits_for`);
- compute waits for the event of the copy that filled the slot (`compute_waits_for`).

On CUDA the queues are streams, so these calls return at once and the device does the waiting. On a CPU each thread is
its own queue: work is done when the call returns, and waiting blocks the calling thread.
"""

import logging
import mmap
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Literal, Protocol

import torch

from engine.config import DeviceName
from engine.errors import ConfigError

logger = logging.getLogger(__name__)

MEMINFO = Path("/proc/meminfo")


class Event(Protocol):
    """A point in a queue; done when all work before it is done."""

    def synchronize(self) -> None:
        """Block the calling thread until the event is done."""


class DoneEvent:
    """The event of work that had been finished when the event was made."""

    def synchronize(self) -> None:
        return


DONE = DoneEvent()


class Device(ABC):
    kind: Literal["cpu", "cuda"]
    torch_device: torch.device

    @abstractmethod
    def empty_bytes(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        """Uninitialised uint8 tensor [num_rows, row_bytes] on the device, its start aligned to a page."""

    @abstractmethod
    def empty_host_bytes(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        """Uninitialised uint8 tensor [num_rows, row_bytes] in the host memory that `copy` likes best; page-aligned."""

    @abstractmethod
    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        """Enqueue a copy from host memory on the copy queue; the event is done when the bytes have arrived."""

    @abstractmethod
    def copy_waits_for(self, event: Event) -> None:
        """Copies enqueued from now on start only when the event is done."""

    @abstractmethod
    def compute_waits_for(self, event: Event) -> None:
        """Compute enqueued from now on starts only when the event is done."""

    @abstractmethod
    def record_compute(self) -> Event:
        """An event that is done when all compute enqueued so far is done."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory that could be allocated now."""

    @abstractmethod
    def describe(self) -> str:
        """Name for people, such as "CPU (2 threads)"."""


class CpuDevice(Device):
    kind = "cpu"
    torch_device = torch.device("cpu")

    def empty_bytes(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        return empty_pages(num_rows, row_bytes)

    def empty_host_bytes(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        return empty_pages(num_rows, row_bytes)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        destination.copy_(source)
        return DONE

    def copy_waits_for(self, event: Event) -> None:
        event.synchronize()

    def compute_waits_for(self, event: Event) -> None:
        event.synchronize()

    def record_compute(self) -> Event:
        return DONE

    def free_bytes(self) -> int:
        # Not the free pages (SC_AVPHYS_PAGES): those leave out the page cache, which the kernel gives back on demand.
        fields = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
        return int(fields["MemAvailable"].removesuffix("kB")) * 1024

    def describe(self) -> str:
        return f"CPU ({torch.get_num_threads()} threads)"


class CudaDevice(Device):
    kind = "cuda"

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self._copy_stream = torch.cuda.Stream(self.torch_device)

    def empty_bytes(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        return torch.empty(num_rows, row_bytes, dtype=torch.uint8, device=self.torch_device)

    def empty_host_bytes(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        pages = empty_pages(num_rows, row_bytes)
        # Registering in place page-locks just these bytes; `pin_memory` would round them up to a power of two.
        if torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), pages.nbytes, 0) != 0:
            logger.warning(
                "%d bytes of host memory could not be page-locked, so transfers will be slow; raise the limit "
                "on locked memory (ulimit -l unlimited)",
                pages.nbytes,
            )
        return pages

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        with torch.cuda.stream(self._copy_stream):
            destination.copy_(source, non_blocking=True)
        event: Event = self._copy_stream.record_event()
        return event

    def copy_waits_for(self, event: Event) -> None:
        self._wait(self._copy_stream, event)

    def compute_waits_for(self, event: Event) -> None:
        self._wait(torch.cuda.current_stream(self.torch_device), event)

    def record_compute(self) -> Event:
        event: Event = torch.cuda.current_stream(self.torch_device).record_event()
        return event

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def describe(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    @staticmethod
    def _wait(stream: torch.cuda.Stream, event: Event) -> None:
        if isinstance(event, torch.cuda.Event):
            stream.wait_event(event)
        else:
            event.synchronize()


def empty_pages(num_rows: int, row_bytes: int) -> torch.Tensor:
    """uint8 [num_rows, row_bytes] in host memory, zeroed, its start aligned to a page."""
    # torch aligns to 64 bytes; direct I/O needs whole pages. The tensor keeps the mapping alive.
    pages = mmap.mmap(-1, max(num_rows * row_bytes, mmap.PAGESIZE))
    return torch.frombuffer(pages, dtype=torch.uint8, count=num_rows * row_bytes).view(num_rows, row_bytes)


def open_device(name: DeviceName) -> Device:
    """The device of that name. Raises `ConfigError` where CUDA is asked for and there is none."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("device is 'cuda', but torch finds no CUDA device here; use --device cpu or --device auto.")
    if name == "cuda" or (name == "auto" and available):
        return CudaDevice()
    return CpuDevice()
