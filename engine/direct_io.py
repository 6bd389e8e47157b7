"""Read files past the page cache.

A cached read would make the slow tier look fast and use memory that no budget shows. Where the file system refuses
direct I/O, each read drops what it left in the page cache. One read of some megabytes is in flight as a whole: the
kernel splits it for the disk's queues, and pieces read by threads of our own were no faster (measured). Callers read
from several threads, so that one read is on its way while another one's bytes are checked or copied.
"""

import errno
import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import Self

logger = logging.getLogger(__name__)

BLOCK_BYTES = 4096
"""Direct I/O wants offsets, sizes and addresses in whole blocks."""


class DirectFile:
    """A file that does not change while it is open; may be read from several threads. Stateful: `close` it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._is_direct = True
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = os.open(path, os.O_RDONLY)
            self._fall_back()
        self.num_bytes = os.fstat(self._fd).st_size

    def read(self, offset: int, destination: memoryview) -> None:
        """Fill `destination`, bytes in host memory, from byte `offset` on; all in whole blocks, its address too.

        Raises `OSError`, also where the file ends early; then the content of `destination` is undefined.
        """
        assert offset % BLOCK_BYTES == 0
        assert len(destination) % BLOCK_BYTES == 0
        was_direct = self._is_direct
        try:
            self._fill(offset, destination)
        except OSError as error:
            # Some file systems open a file for direct I/O and refuse only to read it.
            if error.errno != errno.EINVAL or not was_direct:
                raise
            self._fall_back()
            self._fill(offset, destination)
        if not self._is_direct:
            os.posix_fadvise(self._fd, offset, len(destination), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """No read may be running or follow. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _fill(self, offset: int, destination: memoryview) -> None:
        done = 0
        while done < len(destination):
            count = os.preadv(self._fd, [destination[done:]], offset + done)
            # A direct read can go on only at a whole block; what is less than one is what the file ends with.
            if count < BLOCK_BYTES:
                raise OSError(f"{self._path} ends at byte {offset + done + count}")
            done += count - count % BLOCK_BYTES

    def _fall_back(self) -> None:
        """Read through the page cache from now on; several threads may find out at once that they have to."""
        with self._lock:
            if self._is_direct:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                self._is_direct = False
                logger.warning(
                    "%s does not allow direct I/O; reading through the page cache and dropping it", self._path
                )
