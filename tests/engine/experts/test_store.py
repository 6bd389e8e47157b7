import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.device import CpuDevice, empty_pages
from engine.errors import PackError
from engine.experts.layout import ExpertId, ExpertLayout, LayerLayout
from engine.experts.store import DiskStore, HostStore, RecordFile

LAYOUT = ExpertLayout(
    (
        LayerLayout.of({"up_proj": torch.empty(2, 40, 40)}, is_transposed=False),
        LayerLayout.of({"up_proj": torch.empty(3, 8, 8)}, is_transposed=False),
    )
)


@pytest.fixture
def records() -> torch.Tensor:
    """uint8 [num_experts, expert_bytes]"""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (LAYOUT.num_experts, LAYOUT.expert_bytes), dtype=torch.uint8, generator=generator)


@pytest.fixture
def path(tmp_path: Path, records: torch.Tensor) -> Path:
    path = tmp_path / "experts.bin"
    path.write_bytes(records.numpy().tobytes())
    return path


@pytest.fixture
def no_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system such as some network ones, which opens no file with O_DIRECT."""
    real_open = os.open

    def refusing_open(path: str, flags: int, *args: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real_open(path, flags, *args)

    monkeypatch.setattr(os, "open", refusing_open)


@pytest.fixture(params=["direct", "buffered"])
def file(path: Path, request: pytest.FixtureRequest) -> Iterator[RecordFile]:
    if request.param == "buffered":
        request.getfixturevalue("no_direct_io")
    with RecordFile(path, LAYOUT) as file:
        yield file


def test_every_record_is_read_to_the_byte(file: RecordFile, records: torch.Tensor) -> None:
    buffer = empty_pages(1, LAYOUT.expert_bytes)[0]
    # Not in order, so that the offsets matter.
    for index, expert in reversed(list(enumerate(LAYOUT.experts()))):
        file.read(expert, buffer)
        assert torch.equal(buffer, records[index])


def test_direct_io_is_used_where_the_file_system_has_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags_seen: list[int] = []
    real_open = os.open

    def watching_open(path: str, flags: int, *args: int) -> int:
        flags_seen.append(flags)
        return real_open(path, flags & ~os.O_DIRECT, *args)

    monkeypatch.setattr(os, "open", watching_open)
    RecordFile(path, LAYOUT).close()
    assert len(flags_seen) == 1
    assert flags_seen[0] & os.O_DIRECT


@pytest.mark.usefixtures("no_direct_io")
def test_buffered_reads_are_announced_and_dropped_from_the_page_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    advice: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *args: advice.append(args))
    with caplog.at_level(logging.WARNING), RecordFile(path, LAYOUT) as file:
        file.read(ExpertId(1, 0), empty_pages(1, LAYOUT.expert_bytes)[0])
    assert "direct I/O" in caplog.text
    assert advice == [(2 * LAYOUT.expert_bytes, LAYOUT.expert_bytes, os.POSIX_FADV_DONTNEED)]


@pytest.mark.usefixtures("no_direct_io")
def test_reads_that_come_in_pieces_are_completed(
    path: Path, records: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short_preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        piece = os.pread(fd, 1000, offset)[: len(buffers[0])]
        buffers[0][: len(piece)] = piece
        return len(piece)

    monkeypatch.setattr(os, "preadv", short_preadv)
    buffer = empty_pages(1, LAYOUT.expert_bytes)[0]
    with RecordFile(path, LAYOUT) as file:
        file.read(ExpertId(1, 2), buffer)
    assert torch.equal(buffer, records[4])


@pytest.mark.parametrize("change", [-1, -4096, 1])
def test_a_file_of_the_wrong_size_is_refused(path: Path, change: int) -> None:
    size = path.stat().st_size
    os.truncate(path, size + change)
    with pytest.raises(PackError, match=rf"experts\.bin has {size + change} bytes instead of {size}; delete its"):
        RecordFile(path, LAYOUT)


def test_a_file_cut_under_the_reader_is_an_os_error(file: RecordFile, path: Path) -> None:
    os.truncate(path, 4 * LAYOUT.expert_bytes + 4096)
    buffer = empty_pages(1, LAYOUT.expert_bytes)[0]
    file.read(ExpertId(1, 1), buffer)
    with pytest.raises(OSError, match=r"ends after 4096 of \d+ bytes"):
        file.read(ExpertId(1, 2), buffer)


def test_close_is_idempotent_and_closes_the_file(path: Path) -> None:
    file = RecordFile(path, LAYOUT)
    before = len(os.listdir("/proc/self/fd"))
    file.close()
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def disk_store(path: Path) -> DiskStore:
    return DiskStore(RecordFile(path, LAYOUT))


def host_store(path: Path) -> HostStore:
    with RecordFile(path, LAYOUT) as file:
        return HostStore.load(CpuDevice(), LAYOUT, file, lambda count: None)


@pytest.mark.parametrize("open_store", [disk_store, host_store])
def test_stores_give_the_same_bytes(
    open_store: Callable[[Path], DiskStore | HostStore], path: Path, records: torch.Tensor
) -> None:
    store = open_store(path)
    slab = CpuDevice().empty_bytes(2, LAYOUT.expert_bytes)
    for index, expert in enumerate(LAYOUT.experts()):
        store.fetch(expert, slab[index % 2]).synchronize()
        assert torch.equal(slab[index % 2], records[index])
    store.close()


def test_host_store_reports_each_record_and_outlives_the_file(path: Path, records: torch.Tensor) -> None:
    counts: list[int] = []
    with RecordFile(path, LAYOUT) as file:
        store = HostStore.load(CpuDevice(), LAYOUT, file, counts.append)
    path.unlink()
    assert counts == [1, 2, 3, 4, 5]
    destination = torch.zeros(LAYOUT.expert_bytes, dtype=torch.uint8)
    store.fetch(ExpertId(1, 1), destination).synchronize()
    assert torch.equal(destination, records[3])


def test_disk_store_passes_a_read_error_on(path: Path) -> None:
    store = disk_store(path)
    os.truncate(path, 0)
    with pytest.raises(OSError, match="ends after 0"):
        store.fetch(ExpertId(0, 0), empty_pages(1, LAYOUT.expert_bytes)[0])
    store.close()
