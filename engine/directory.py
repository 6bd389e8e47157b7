"""Make a directory appear complete or not at all, once, whoever asks for it at the same time.

The content is written into a hidden sibling, flushed to the disk, and renamed. A lock file beside it admits one
builder; the operating system releases the lock of a builder that dies, and the next one removes what it left.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


def ensure_directory(
    path: Path, is_intact: Callable[[Path], bool], build: Callable[[Path], None], waiting: Callable[[], None]
) -> None:
    """Return when `path` is intact; otherwise replace it by what `build` writes into the empty directory it is given.

    `waiting` is called once where another process is building. Whatever `build` raises leaves `path` as it was.
    """
    if is_intact(path):
        return
    with only_writer(path, waiting):
        if not is_intact(path):
            _replace(path, build)


@contextmanager
def only_writer(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
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


def _replace(path: Path, build: Callable[[Path], None]) -> None:
    partial = path.parent / f".{path.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        build(partial)
        _flush(partial)
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
        _flush_one(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _flush(directory: Path) -> None:
    for path in directory.rglob("*"):
        _flush_one(path)
    _flush_one(directory)


def _flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
