"""How fast experts come from disk and from host memory on this machine, measured in a moment at start."""

import random
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from engine.device import Device, empty_pages
from engine.direct_io import BLOCK_BYTES, DirectFile

READ_BYTES = 8 * 2**20
"""Of the size of an expert."""

COPY_BYTES = 32 * 2**20
"""Large enough that starting a copy does not count, and of the size of a large expert."""


PIECE_SECONDS = 1.25e-3
"""How long a demand may have to wait for what is under way. Shorter pieces cost more than they save."""


def piece_bytes(bandwidth: float) -> int:
    """How much of an expert to move at once at so many bytes per second."""
    return max(1, round(bandwidth * PIECE_SECONDS / BLOCK_BYTES)) * BLOCK_BYTES


def measure_disk(path: Path, max_seconds: float = 0.25) -> float | None:
    """Bytes per second of reads at random places of the file, past the page cache; None where it is too small to tell.

    The read that is running after `max_seconds` is finished and counts. Raises `OSError`.
    """
    with DirectFile(path) as file:
        if file.num_bytes < READ_BYTES:
            return None
        buffer = empty_pages(1, READ_BYTES)[0].numpy().data
        num_places = (file.num_bytes - READ_BYTES) // BLOCK_BYTES + 1
        places = random.Random(0)

        def read() -> None:
            file.read(places.randrange(num_places) * BLOCK_BYTES, buffer)

        return _bytes_per_second(read, READ_BYTES, max_seconds)


def measure_copy(device: Device, max_seconds: float = 0.1) -> float:
    """Bytes per second of copies from host memory to the device, one after the other, after one that does not count.

    The copy that is running after `max_seconds` is finished and counts. Raises `InsufficientMemoryError`.
    """
    source = device.empty_host_bytes(1, COPY_BYTES)
    try:
        destination = device.empty_bytes(1, COPY_BYTES)

        def copy() -> None:
            device.copy(destination, source).synchronize()

        copy()
        return _bytes_per_second(copy, COPY_BYTES, max_seconds)
    finally:
        device.release_host_bytes(source)


def _bytes_per_second(move: Callable[[], None], num_bytes: int, max_seconds: float) -> float:
    """`move` moves `num_bytes`, and is called at least once."""
    started = perf_counter()
    num_moves = 0
    while True:
        move()
        num_moves += 1
        seconds = perf_counter() - started
        if seconds >= max_seconds:
            return num_moves * num_bytes / seconds
