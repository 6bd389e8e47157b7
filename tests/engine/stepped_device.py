"""A device whose work is done only when somebody says so, to prove the rules of `engine.device` without a GPU.

Like CUDA it has two queues. Copies really happen when the copy queue gets to them; until then a slot holds what it
held before. Compute is done by torch at once, but its events stay open, so the slots that it read count as in use until
then, and what it sends to the host is -1 there until then.
Whoever waits for an event drives the device until the event is done, in an order that a seed chooses.
"""

import random
import threading
from collections import deque
from dataclasses import dataclass, field

import torch

from engine.device import Device, Event, HostCopy, empty_pages


class SteppedEvent:
    """Done when its device has got there."""

    def __init__(self, device: "SteppedDevice", slot: torch.Tensor | None = None) -> None:
        self.device = device
        self.slot = slot
        """What the copy before the event fills; None for events of compute."""
        self.reads: list[int] = []
        """Addresses of the slots that the compute before the event read."""
        self.to_host: Copy | None = None
        """What else happens when the compute queue gets to the event."""
        self.is_done = False

    def synchronize(self) -> None:
        self.device.drive_until(self)


@dataclass
class Copy:
    destination: torch.Tensor
    source: torch.Tensor
    event: SteppedEvent


@dataclass
class SteppedDevice(Device):
    """`advance_copies` and `finish_compute` are the test's hands; with a seed, waiting moves them too."""

    seed: int = 0
    kind = "cuda"
    torch_device = torch.device("cpu")
    copies: deque[Copy | SteppedEvent] = field(default_factory=deque)
    """The copy queue: copies, and events that those behind them wait for."""
    computes: deque[SteppedEvent] = field(default_factory=deque)
    """The compute queue's open events."""
    log: list[str] = field(default_factory=list)
    registered: dict[int, int] = field(default_factory=dict)
    """Bytes of host memory that has not been released, by its address."""

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._random = random.Random(self.seed)
        self._reading: list[int] = []

    def empty_bytes(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        return empty_pages(num_rows, row_bytes).fill_(0xFF)  # NaN in every type

    def empty_host_bytes(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        pages = empty_pages(num_rows, row_bytes)
        self.registered[pages.data_ptr()] = pages.nbytes
        return pages

    def release_host_bytes(self, host_bytes: torch.Tensor) -> None:
        with self._lock:
            sources = [copy.source.untyped_storage().data_ptr() for copy in self.copies if isinstance(copy, Copy)]
            assert host_bytes.data_ptr() not in sources, "host memory was released before the copies out of it"
            del self.registered[host_bytes.data_ptr()]

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        with self._lock:
            event = SteppedEvent(self, destination)
            self.copies.append(Copy(destination, source, event))
            return event

    def to_host(self, source: torch.Tensor) -> HostCopy:
        with self._lock:
            event = SteppedEvent(self)
            event.to_host = Copy(torch.full_like(source, -1), source.clone(), event)
            self.computes.append(event)
            return HostCopy(event.to_host.destination, event)

    def copy_waits_for(self, event: Event) -> None:
        if isinstance(event, SteppedEvent):
            with self._lock:
                self.copies.append(event)

    def compute_waits_for(self, event: Event) -> None:
        assert isinstance(event, SteppedEvent)
        assert event.slot is not None
        self.drive_until(event)
        with self._lock:
            self._reading.append(event.slot.data_ptr())

    def record_compute(self) -> Event:
        with self._lock:
            event = SteppedEvent(self)
            event.reads, self._reading = self._reading, []
            self.computes.append(event)
            self.log.append("compute")
            return event

    def free_bytes(self) -> int:
        return 1 << 40

    def describe(self) -> str:
        return "stepped device"

    def advance_copies(self) -> bool:
        """Do the next copy, unless it has to wait; whether one was done."""
        with self._lock:
            while self.copies and isinstance(blocker := self.copies[0], SteppedEvent):
                if not blocker.is_done:
                    return False
                self.copies.popleft()
            if not self.copies:
                return False
            copy = self.copies.popleft()
            assert isinstance(copy, Copy)
            in_use = [address for event in self.computes for address in event.reads] + self._reading
            assert copy.destination.data_ptr() not in in_use, "a slot in use was overwritten"
            copy.destination.copy_(copy.source)
            copy.event.is_done = True
            self.log.append("copy")
            return True

    def finish_compute(self) -> bool:
        """Complete the oldest open compute event; whether there was one."""
        with self._lock:
            if not self.computes:
                return False
            event = self.computes.popleft()
            if event.to_host is not None:
                event.to_host.destination.copy_(event.to_host.source)
            event.is_done = True
            return True

    def drive_until(self, event: SteppedEvent) -> None:
        """Let the device work until the event is done."""
        while True:
            with self._lock:
                if event.is_done:
                    return
                steps = [self.advance_copies, self.finish_compute]
                self._random.shuffle(steps)
                assert steps[0]() or steps[1](), "the device waits for something that never comes"
