import errno
import fcntl
import logging
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.device import empty_pages
from engine.direct_io import BLOCK_BYTES, DirectFile

NUM_THREADS = 4
NUM_BLOCKS = 26
CONTENT = random.Random(0).randbytes(NUM_BLOCKS * BLOCK_BYTES)

Preadv = Callable[[int, list[memoryview], int], int]
real_preadv: Preadv = os.preadv


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "content.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def no_direct_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system such as some network ones, which opens no file with O_DIRECT."""
    real_open = os.open

    def refusing_open(path: str, flags: int, *args: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real_open(path, flags, *args)

    monkeypatch.setattr(os, "open", refusing_open)


@pytest.fixture
def no_direct_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that opens files with O_DIRECT, but does not read them."""

    def refusing_preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here either")
        return real_preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing_preadv)


@pytest.fixture(params=["direct", "no_direct_open", "no_direct_read"])
def mode(request: pytest.FixtureRequest) -> str:
    """The kinds of file systems; "direct" is the one that the tests run on, whatever it can do."""
    mode = str(request.param)
    if mode != "direct":
        request.getfixturevalue(mode)
    return mode


def pages(num_blocks: int) -> memoryview:
    return empty_pages(num_blocks, BLOCK_BYTES).view(-1).numpy().data


def read(file: DirectFile, first_block: int, num_blocks: int) -> bytes:
    buffer = pages(num_blocks)
    file.read(first_block * BLOCK_BYTES, buffer)
    return bytes(buffer)


def content(first_block: int, num_blocks: int) -> bytes:
    return CONTENT[first_block * BLOCK_BYTES : (first_block + num_blocks) * BLOCK_BYTES]


@pytest.mark.usefixtures("mode")
def test_every_byte_is_read(path: Path) -> None:
    with DirectFile(path) as file:
        assert file.num_bytes == len(CONTENT)
        assert read(file, 0, NUM_BLOCKS) == CONTENT
        for first_block, num_blocks in [(25, 1), (3, 4), (7, 9), (0, 1)]:
            assert read(file, first_block, num_blocks) == content(first_block, num_blocks)


@pytest.mark.usefixtures("mode")
def test_several_threads_read_at_once(path: Path) -> None:
    ranges = [(index % 17, 1 + index % 9) for index in range(200)]
    with DirectFile(path) as file, ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda part: read(file, *part), ranges))
    assert results == [content(*part) for part in ranges]


def test_threads_that_find_out_together_that_direct_reads_are_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    together = threading.Barrier(NUM_THREADS)

    def refusing_preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            together.wait(timeout=5)
            raise OSError(errno.EINVAL, "no direct I/O here either")
        return real_preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing_preadv)
    with DirectFile(path) as file, ThreadPoolExecutor(NUM_THREADS) as threads:
        results = list(threads.map(lambda block: read(file, block, 2), range(NUM_THREADS)))
    assert results == [content(block, 2) for block in range(NUM_THREADS)]
    assert len(caplog.records) == 1


def test_direct_io_is_used_where_the_file_system_has_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flags_seen: list[int] = []
    real_open = os.open

    def watching_open(path: str, flags: int, *args: int) -> int:
        flags_seen.append(flags)
        return real_open(path, flags & ~os.O_DIRECT, *args)

    monkeypatch.setattr(os, "open", watching_open)
    with DirectFile(path) as file:
        read(file, 0, 1)
    assert len(flags_seen) == 1
    assert flags_seen[0] & os.O_DIRECT
    assert not caplog.text


@pytest.mark.parametrize("refusal", ["no_direct_open", "no_direct_read"])
def test_buffered_reads_are_announced_once_and_dropped_from_the_page_cache(
    refusal: str,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    request.getfixturevalue(refusal)
    advice: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *args: advice.append(args))
    with caplog.at_level(logging.WARNING), DirectFile(path) as file:
        assert read(file, 2, 14) == content(2, 14)
        assert read(file, 20, 1) == content(20, 1)
    assert [record.message for record in caplog.records] == [
        f"{path} does not allow direct I/O; reading through the page cache and dropping it"
    ]
    dropped = [(2, 14), (20, 1)]
    assert sorted(advice) == [
        (first * BLOCK_BYTES, count * BLOCK_BYTES, os.POSIX_FADV_DONTNEED) for first, count in dropped
    ]


def test_a_read_that_is_refused_in_any_mode_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def refusing_preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        raise OSError(errno.EINVAL, "never")

    monkeypatch.setattr(os, "preadv", refusing_preadv)
    with DirectFile(path) as file:
        for _ in range(2):
            with pytest.raises(OSError, match="never"):
                read(file, 0, 1)
    assert len(calls) <= 3


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("most_bytes", [BLOCK_BYTES, BLOCK_BYTES + 1000, 4 * BLOCK_BYTES - 1])
def test_short_reads_are_completed(path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int) -> None:
    preadv: Preadv = os.preadv

    def short_preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        assert offset % BLOCK_BYTES == 0, "a direct read has to start at a block"
        count = min(preadv(fd, buffers, offset), most_bytes)
        buffers[0][count:] = bytes(len(buffers[0]) - count)
        return count

    monkeypatch.setattr(os, "preadv", short_preadv)
    with DirectFile(path) as file:
        assert read(file, 0, NUM_BLOCKS) == CONTENT


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("num_bytes", [0, 5 * BLOCK_BYTES, 5 * BLOCK_BYTES + 100])
def test_a_file_that_ends_early_is_an_error(path: Path, num_bytes: int) -> None:
    with DirectFile(path) as file:
        assert read(file, 0, NUM_BLOCKS) == CONTENT
        os.truncate(path, num_bytes)
        with pytest.raises(OSError, match=rf"content\.bin ends at byte {num_bytes}"):
            read(file, 0, 8)


def test_what_is_not_whole_blocks_is_refused(path: Path) -> None:
    with DirectFile(path) as file:
        with pytest.raises(AssertionError):
            file.read(512, pages(1))
        with pytest.raises(AssertionError):
            file.read(0, pages(1)[:512])


def test_a_file_that_cannot_be_opened_for_another_reason_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def failing_open(path: str, flags: int, *args: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EMFILE, "too many open files")
        return real_open(path, flags, *args)

    monkeypatch.setattr(os, "open", failing_open)
    with pytest.raises(OSError, match="too many open files"):
        DirectFile(path)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        DirectFile(tmp_path / "nothing")


@pytest.mark.usefixtures("mode")
def test_close_is_idempotent_and_leaves_no_descriptor(path: Path) -> None:
    num_descriptors = len(os.listdir("/proc/self/fd"))
    file = DirectFile(path)
    read(file, 0, NUM_BLOCKS)
    assert len(os.listdir("/proc/self/fd")) == num_descriptors + 1
    file.close()
    file.close()
    assert len(os.listdir("/proc/self/fd")) == num_descriptors
