import random
from pathlib import Path

import pytest

from engine.device import CpuDevice, DoneEvent
from engine.direct_io import BLOCK_BYTES, DirectFile
from engine.experts.bandwidth import COPY_BYTES, READ_BYTES, measure_copy, measure_disk
from tests.engine.stepped_device import SteppedDevice


class Clock:
    """Time that passes only when something is moved."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("engine.experts.bandwidth.perf_counter", clock)
    return clock


@pytest.fixture
def reads(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Offset and size of what was read; each read takes an eighth of a second."""
    reads: list[tuple[int, int]] = []

    def timed_read(file: DirectFile, offset: int, destination: memoryview) -> None:
        reads.append((offset, len(destination)))
        clock.seconds += 0.125

    monkeypatch.setattr(DirectFile, "read", timed_read)
    return reads


def file_of(directory: Path, num_bytes: int) -> Path:
    """A file with a hole instead of content."""
    path = directory / "file.bin"
    path.touch()
    with path.open("r+b") as file:
        file.truncate(num_bytes)
    return path


def test_a_disk_is_measured_by_large_reads_at_many_places(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    size = 100 * READ_BYTES + BLOCK_BYTES
    bandwidth = measure_disk(file_of(tmp_path, size), max_seconds=4.0)
    assert bandwidth == READ_BYTES / 0.125
    assert len(reads) == 32
    assert len({offset for offset, _ in reads}) > 20
    assert all(num_bytes == READ_BYTES for _, num_bytes in reads)
    assert all(offset % BLOCK_BYTES == 0 and offset + num_bytes <= size for offset, num_bytes in reads)


def test_a_disk_slower_than_the_time_that_it_gets_is_measured_by_one_read(
    tmp_path: Path, reads: list[tuple[int, int]]
) -> None:
    assert measure_disk(file_of(tmp_path, 100 * READ_BYTES), max_seconds=0.01) == READ_BYTES / 0.125
    assert len(reads) == 1


@pytest.mark.parametrize("num_bytes", [0, READ_BYTES - 1])
def test_a_file_smaller_than_one_read_tells_nothing(tmp_path: Path, num_bytes: int) -> None:
    assert measure_disk(file_of(tmp_path, num_bytes)) is None


def test_a_real_file_is_measured_in_the_time_that_it_gets(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(random.Random(0).randbytes(READ_BYTES + 1))
    bandwidth = measure_disk(path, max_seconds=0.01)
    assert bandwidth is not None
    assert bandwidth > 0


class TimedDevice(CpuDevice):
    """Copies take half a second, the first one a minute, and not before their events are waited for."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.num_copies = 0

    def copy(self, destination: object, source: object) -> DoneEvent:
        device, seconds = self, 0.5 if self.num_copies else 60.0
        self.num_copies += 1
        assert self.num_copies < 100, "time does not pass, as nobody waits for the copies"

        class Event(DoneEvent):
            def synchronize(self) -> None:
                device.clock.seconds += seconds

        return Event()


def test_copies_are_measured_to_their_end_and_after_the_first(clock: Clock) -> None:
    device = TimedDevice(clock)
    assert measure_copy(device, max_seconds=1.75) == COPY_BYTES / 0.5
    assert device.num_copies == 1 + 4


def test_what_was_allocated_to_measure_copies_is_released() -> None:
    device = SteppedDevice()
    assert measure_copy(device, max_seconds=0.0) > 0
    assert device.log == ["copy", "copy"]
    assert not device.copies
    assert not device.registered


def test_a_failing_copy_leaves_nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SteppedDevice()

    def fail(destination: object, source: object) -> DoneEvent:
        raise RuntimeError("the device is broken")

    monkeypatch.setattr(device, "copy", fail)
    with pytest.raises(RuntimeError, match="broken"):
        measure_copy(device)
    assert not device.registered


def test_copies_on_this_machine_are_plausible() -> None:
    assert 1e6 < measure_copy(CpuDevice(), max_seconds=0.01) < 1e13
