"""The memory that this process itself holds, as opposed to what the machine has (`engine.host_memory`)."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.host_memory import peak_bytes

CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"

M_MMAP_THRESHOLD = -3
"""Parameter of `mallopt`: from which size on memory is mapped by itself, and so goes back when it is freed."""
FRUGAL_BYTES = 256 * 1024
GENEROUS_BYTES = 32 * 1024**2
"""glibc itself raises the threshold up to this as blocks are freed, which saves page faults and hoards memory."""


class Peak:
    """Mutable: filled in when the block ends."""

    num_bytes = 0


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measure the most memory that was resident within the block, without what was freed before it.

    Where the kernel cannot reset its measurement, that of the process so far.
    """
    gc.collect()
    release_freed_memory()
    with suppress(OSError):
        CLEAR_REFS.write_text(RESET_PEAK)
    peak = Peak()
    try:
        yield peak
    finally:
        peak.num_bytes = peak_bytes()


@contextmanager
def frugal_memory() -> Iterator[None]:
    """Within the block tensors go back to the system when they are freed, which costs time where they are many.

    Unless they fit into what malloc had hoarded before: `release_freed_memory` now and then.
    """
    with suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, FRUGAL_BYTES)
    try:
        yield
    finally:
        with suppress(AttributeError):
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, GENEROUS_BYTES)


def release_freed_memory() -> None:
    """Give memory that was freed back to the system; glibc keeps much of what tensors of some megabytes leave."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
