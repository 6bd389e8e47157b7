"""Make a directory appear complete or not at all, once, whoever asks for it at the same time.

The content is written into a hidden sibling, flushed to the disk, and renamed. A lock file beside it admits one
builder; the operating system releases the lock of a builder that dies, and the next one removes what it left, or goes
on with it where the content can be resumed.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


def ensure_directory(
    path: Path,
    is_intact: Callable[[Path], bool],
    build: Callable[[Path], None],
    waiting: Callable[[], None],
    *,
    is_resumable: bool = False,
) -> None:
    """Return when `path` is intact; otherwise replace it by what `build` writes into the directory it is given.

    `waiting` is called once where another process is building. Whatever `build` raises leaves `path` as it was. The
    directory is empty, unless the build `is_resumable`: then it holds what an interrupted one left (it was killed, or
    ended by what is no `Exception`, or by a lost connection); other errors leave nothing.
    """
    if is_intact(path):
        return
    with _only_writer(path, waiting):
        if not is_intact(path):
            _replace(path, build, is_resumable)


def partial_directory(path: Path) -> Path:
    """Where the content of `path` is while it is being built."""
    return path.parent / f".{path.name}.partial"


@contextmanager
def _only_writer(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Within the block, no other process that asks this way writes `path`; `waiting` is called where one does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.parent / f".{path.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        waiting()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _replace(path: Path, build: Callable[[Path], None], is_resumable: bool) -> None:
    partial = partial_directory(path)
    if not is_resumable:
        shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(exist_ok=True)
    try:
        build(partial)
        _flush(partial)
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
        flush(path.parent)
    except BaseException as error:
        is_interruption = not isinstance(error, Exception) or isinstance(error, ConnectionError)
        if not (is_resumable and is_interruption):
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _flush(directory: Path) -> None:
    for path in directory.rglob("*"):
        flush(path)
    flush(directory)


def flush(path: Path) -> None:
    """Return when what was written to the file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
