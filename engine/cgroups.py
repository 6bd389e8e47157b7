"""Control groups for memory, of version 1 or 2: which ones a process is in, and what they leave it.

In a container, or under systemd, each group from the process's own up to the root may have a limit, and the kernel
kills where one is exceeded. Groups are read through files, which are laid out as the mount table says. What cannot be
read sets no limit. Knows the operating system only, so both processes may use it.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class CgroupFiles(NamedTuple):
    """The names of a version of control groups."""

    file_system: str
    limit: str
    usage: str
    page_cache: tuple[str, str]
    """Fields of memory.stat that count the group's own and those below it."""
    kills: str
    """Of what holds the field "oom_kill": how many processes the limit has killed."""


V1 = CgroupFiles(
    file_system="cgroup",
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    page_cache=("total_active_file", "total_inactive_file"),
    kills="memory.oom_control",
)
V2 = CgroupFiles(
    file_system="cgroup2",
    limit="memory.max",
    usage="memory.current",
    page_cache=("active_file", "inactive_file"),
    kills="memory.events",
)


class Mount(NamedTuple):
    root: str
    """The control group that lies at `point`: of a container often not the topmost one."""
    point: Path


def free_bytes(root: Path = Path("/")) -> int | None:
    """What the groups of this process leave it, in bytes; None where none has a limit. `root` is the file system's."""
    rooms = [_room(group, files) for files in (V1, V2) for group in groups(root, files)]
    return min((room for room in rooms if room is not None), default=None)


def groups(root: Path, files: CgroupFiles) -> list[Path]:
    """The directories of the process's control group and of those around it, as far as they can be seen from here."""
    path, mounts = _own_group(root, files), _mounts(root, files)
    if path is None or not mounts:
        return []
    for mount in mounts:
        directory = _directory_below(mount, path)
        if directory is not None:
            break
    else:
        # The path is one of another namespace, whose part that concerns this process is what is mounted.
        mount = mounts[0]
        directory = mount.point
    return [group for group in (directory, *directory.parents) if group.is_relative_to(mount.point)]


def _room(group: Path, files: CgroupFiles) -> int | None:
    """Bytes that may still be charged to the control group; None where it has no limit."""
    limit, usage = (_number(_text(group / name).strip()) for name in (files.limit, files.usage))
    if limit is None or usage is None:
        return None
    # At the limit the kernel takes back the pages of files, active ones too, before it kills: what MemAvailable counts
    # as well. Shared memory is page cache by name, but goes nowhere without swap, and these fields leave it out.
    stat = fields(group / "memory.stat")
    return limit - usage + sum(stat.get(field, 0) for field in files.page_cache)


def _directory_below(mount: Mount, path: PurePosixPath) -> Path | None:
    """Where a control group is mounted; None where it is not."""
    if not path.is_relative_to(mount.root):
        return None
    below = path.relative_to(mount.root)
    directory = mount.point / below
    return directory if ".." not in below.parts and os.path.isdir(directory) else None


def _own_group(root: Path, files: CgroupFiles) -> PurePosixPath | None:
    """The process's control group for memory, from lines such as `0::/user.slice` and `4:cpu,memory:/docker/1f`."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(",") if files is V1 else hierarchy == "0":
            return PurePosixPath(path)
    return None


def _mounts(root: Path, files: CgroupFiles) -> list[Mount]:
    """Where control groups for memory are mounted, as proc_pid_mountinfo(5) describes the table."""
    mounts = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        match before.split(" "), after.split(" "):
            case [_, _, _, top, point, *_], [files.file_system, _, options]:
                if files is V2 or "memory" in options.split(","):
                    mounts.append(Mount(_unescape(top), root / _unescape(point).lstrip("/")))
    return mounts


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def fields(path: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number per line, in bytes where the unit is kB."""
    fields = {}
    for line in _text(path).splitlines():
        name, *rest = line.split() or [""]
        if rest and (number := _number(rest[0])) is not None:
            fields[name] = number * 1024 if rest[1:] == ["kB"] else number
    return fields


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,20}", text) else None


def _text(path: Path) -> str:
    """Empty where the file cannot be read."""
    try:
        return path.read_text(errors="surrogateescape")
    except (OSError, ValueError):
        return ""
