"""The device: where tensors live and in which order work on them runs. The only place that says `torch.cuda`.

Two queues of work exist. The *compute* queue runs the model and belongs to the thread of the step loop. The *copy*
queue moves experts and belongs to the transfer threads. They are ordered against each other only by events:

- a copy into a slot waits for the event that marks the slot's last use by compute (`copy_waits_for`);
- compute waits for the event of the copy that filled the slot (`compute_waits_for`).

What compute sends to the host (`to_host`) is read there after the event of that copy.

On CUDA the queues are streams, so these calls return at once and the device does the waiting. On a CPU each thread is
its own queue: work is done when the call returns, and waiting blocks the calling thread.
"""

import logging
import mmap
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Literal, NamedTuple, Protocol

import torch

from engine.config import DeviceName
from engine.errors import ConfigError, InsufficientMemoryError
from engine.host_memory import available_bytes

logger = logging.getLogger(__name__)


class Event(Protocol):
    """A point in a queue; done when all work before it is done."""

    def synchronize(self) -> None:
        """Block the calling thread until the event is done."""


class DoneEvent:
    """The event of work that had been finished when the event was made."""

    def synchronize(self) -> None:
        return


DONE = DoneEvent()


class HostCopy(NamedTuple):
    """A copy of a device tensor on its way to host memory."""

    destination: torch.Tensor
    """Undefined until the event is done; take `tensor()`."""
    arrived: Event

    def tensor(self) -> torch.Tensor:
        """The copy, in host memory; blocks the calling thread until its bytes are there."""
        self.arrived.synchronize()
        return self.destination


class Device(ABC):
    kind: Literal["cpu", "cuda"]
    torch_device: torch.device

    @abstractmethod
    def empty_bytes(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        """Uninitialised uint8 tensor [num_rows, row_bytes] on the device; in host memory it starts at a page."""

    @abstractmethod
    def empty_host_bytes(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        """Uninitialised uint8 tensor [num_rows, row_bytes] in the host memory that `copy` likes best; page-aligned.

        Whoever asks for it gives it back with `release_host_bytes`. Raises `InsufficientMemoryError`.
        """

    @abstractmethod
    def release_host_bytes(self, host_bytes: torch.Tensor) -> None:
        """Give back a tensor of `empty_host_bytes`, out of which no copy may be running; then drop all views of it."""

    @abstractmethod
    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        """Enqueue a copy from host memory on the copy queue; the event is done when the bytes have arrived."""

    @abstractmethod
    def to_host(self, source: torch.Tensor) -> HostCopy:
        """Enqueue a copy of a small tensor of the device on the compute queue, behind what computes it.

        On a CPU it is the tensor itself.
        """

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

    def release_host_bytes(self, host_bytes: torch.Tensor) -> None:
        return

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        destination.copy_(source)
        return DONE

    def to_host(self, source: torch.Tensor) -> HostCopy:
        return HostCopy(source, DONE)

    def copy_waits_for(self, event: Event) -> None:
        event.synchronize()

    def compute_waits_for(self, event: Event) -> None:
        event.synchronize()

    def record_compute(self) -> Event:
        return DONE

    def free_bytes(self) -> int:
        return available_bytes()

    def describe(self) -> str:
        return f"CPU ({torch.get_num_threads()} threads)"


class CudaDevice(Device):
    kind = "cuda"

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self._copy_stream = torch.cuda.Stream(self.torch_device)
        self._registered: dict[int, torch.Tensor] = {}
        """Page-locked memory by its address; held here, as a mapping must not go away while it is registered."""

    def empty_bytes(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        return torch.empty(num_rows, row_bytes, dtype=torch.uint8, device=self.torch_device)

    def empty_host_bytes(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        pages = empty_pages(num_rows, row_bytes)
        # Registering in place page-locks just these bytes; `pin_memory` would round them up to a power of two.
        if torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), pages.nbytes, 0) == 0:
            self._registered[pages.data_ptr()] = pages
        else:
            self._discard_error()
            logger.warning(
                "%d bytes of host memory could not be page-locked, so copies from there to the GPU will be slower; "
                "raise the limit on locked memory (ulimit -l unlimited, or docker run --ulimit memlock=-1)",
                pages.nbytes,
            )
        return pages

    def release_host_bytes(self, host_bytes: torch.Tensor) -> None:
        if self._registered.pop(host_bytes.data_ptr(), None) is not None:
            torch.cuda.cudart().cudaHostUnregister(host_bytes.data_ptr())

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        with torch.cuda.stream(self._copy_stream):
            destination.copy_(source, non_blocking=True)
        event: Event = self._copy_stream.record_event()
        return event

    def to_host(self, source: torch.Tensor) -> HostCopy:
        # torch keeps page-locked memory that was let go, and gives it out again only once the copies into it are done.
        destination = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        destination.copy_(source, non_blocking=True)
        return HostCopy(destination, self.record_compute())

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

    def _discard_error(self) -> None:
        """Forget the thread's last CUDA error, which is known already; else the next kernel launch would raise it."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device).add_(1)

    @staticmethod
    def _wait(stream: torch.cuda.Stream, event: Event) -> None:
        if isinstance(event, torch.cuda.Event):
            stream.wait_event(event)
        else:
            event.synchronize()


def empty_pages(num_rows: int, row_bytes: int) -> torch.Tensor:
    """uint8 [num_rows, row_bytes] in host memory, zeroed, its start aligned to a page.

    Raises `InsufficientMemoryError` where the operating system refuses as much at once.
    """
    num_bytes = num_rows * row_bytes
    try:
        # torch aligns to 64 bytes; direct I/O needs whole pages. The tensor keeps the mapping alive.
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise InsufficientMemoryError(
            f"{num_bytes / 1e6:.0f} MB of host memory cannot be had at once ({error.strerror}); "
            "lower --device-memory or --host-memory, or free some."
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Fewer pages to fault in, to lock and to look up; a kernel without huge pages says EINVAL.
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes).view(num_rows, row_bytes)


def open_device(name: DeviceName) -> Device:
    """The device of that name. Raises `ConfigError` where CUDA is asked for and there is none."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("device is 'cuda', but torch finds no CUDA device here; use --device cpu or --device auto.")
    if name == "cuda" or (name == "auto" and available):
        return CudaDevice()
    return CpuDevice()
