"""Control groups that hold engines to their budget, so that the page cache is no second cache for experts.

As `python -m server.bench.cgroup GROUP -- COMMAND...` it joins the group and becomes the command.
"""

import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from engine.cgroups import V1, V2, CgroupFiles, fields, groups

log = logging.getLogger(__name__)

PROCESSES = "cgroup.procs"
SWAP_LIMITS = ("memory.memsw.limit_in_bytes", "memory.swap.max")
REMOVAL_SECONDS = 5.0
"""The kernel needs a moment after the last process of a group has ended."""
RETRY_SECONDS = 0.02
PROBE_BYTES = 64 * 1024**2


class MemoryGroup(NamedTuple):
    path: Path
    files: CgroupFiles
    limit_bytes: int

    def command(self, command: Sequence[str]) -> list[str]:
        """The command, run inside the group."""
        return [sys.executable, "-m", "server.bench.cgroup", str(self.path), "--", *command]

    @property
    def num_kills(self) -> int:
        """Processes that the limit has killed."""
        return fields(self.path / self.files.kills).get("oom_kill", 0)

    def remove(self) -> None:
        """End what still runs in it, and remove it; idempotent. What cannot be removed is said in the log."""
        deadline = time.monotonic() + REMOVAL_SECONDS
        while self.path.exists():
            self._kill()
            try:
                os.rmdir(self.path)
            except FileNotFoundError:
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    log.warning("The control group %s cannot be removed: %s.", self.path, error.strerror)
                    return
                time.sleep(RETRY_SECONDS)

    def _kill(self) -> None:
        with suppress(OSError):
            for pid in (self.path / PROCESSES).read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


class MemoryGroups:
    """Makes groups beside or around this process's own, and removes them all in the end. Mutable; a context manager."""

    def __init__(self, root: Path = Path("/")) -> None:
        """`root` is the file system's."""
        self._numbers = itertools.count()
        self._groups: list[MemoryGroup] = []
        self.reason = "there is no control group for memory here"
        """Why none can be made; of no meaning where one can."""
        self._parent = self._find_parent(root)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for group in list(self._groups):
            self.remove(group)

    @property
    def version(self) -> int | None:
        """Of control groups; None where none can be made."""
        if self._parent is None:
            return None
        return 1 if self._parent[1] is V1 else 2

    def make(self, limit_bytes: int) -> MemoryGroup | None:
        """None where none can be made here."""
        if self._parent is None:
            return None
        group = self._make(*self._parent, limit_bytes)
        self._groups.append(group)
        return group

    def remove(self, group: MemoryGroup) -> None:
        group.remove()
        if group in self._groups:
            self._groups.remove(group)

    def _find_parent(self, root: Path) -> tuple[Path, CgroupFiles] | None:
        """The nearest group in which another one can be made and limited, by trying.

        Of version 2, that is never one with processes of its own, except for the root.
        """
        for files in (V1, V2):
            for parent in groups(root, files):
                try:
                    group = self._make(parent, files, PROBE_BYTES)
                except OSError as error:
                    self.reason = f"{parent}: {error.strerror}"
                    continue
                group.remove()
                return parent, files
        return None

    def _make(self, parent: Path, files: CgroupFiles, limit_bytes: int) -> MemoryGroup:
        """Raises OSError where that is not possible."""
        group = MemoryGroup(parent / f"specter-bench-{os.getpid()}-{next(self._numbers)}", files, limit_bytes)
        os.mkdir(group.path)
        try:
            _write(group.path / files.limit, limit_bytes)
        except OSError:
            group.remove()
            raise
        for name in SWAP_LIMITS:
            # Swapped pages would be another hidden memory. Version 1 counts them together with the others.
            with suppress(OSError):
                _write(group.path / name, limit_bytes if files is V1 else 0)
        return group


def _write(path: Path, number: int) -> None:
    """To a file that exists: in a group without the controller there is none."""
    with path.open("r+") as file:
        file.write(str(number))


def main(arguments: Sequence[str]) -> None:
    group, separator, *command = arguments
    assert separator == "--", arguments
    _write(Path(group) / PROCESSES, os.getpid())
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
