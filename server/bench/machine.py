"""What there is of this machine, and what a process takes of it."""

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from engine import cgroups
from engine.cgroups import fields
from engine.protocol import ModelPlan

FREE_SHARE = 0.8
"""Of the memory that is free, what engines side by side may take."""
PACKAGES = ("torch", "transformers", "accelerate")


def is_cpu(plan: ModelPlan) -> bool:
    """Whether the device's memory is RAM, and several engines may share it."""
    return plan.device.startswith("CPU")


def free_bytes() -> int:
    """Memory for engines, by the machine and by the control groups that this process is in."""
    machine = fields(Path("/proc/meminfo")).get("MemAvailable:", 0)
    room = cgroups.free_bytes()
    return int(FREE_SHARE * (machine if room is None else min(machine, room)))


def peak_rss_bytes(pid: int) -> int | None:
    """The most memory that the process has had resident so far; None where it is gone, or nothing tells."""
    return fields(Path(f"/proc/{pid}/status")).get("VmHWM:")


def forget_files(directory: Path) -> None:
    """Have the kernel drop the page cache of a directory's files, which would serve an engine from outside its budget.

    Pages that a process has mapped stay. Where that is not possible, nothing happens.
    """
    for path in directory.rglob("*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def describe_machine(plan: ModelPlan) -> dict[str, Any]:
    """For the JSON file, so that results can be told apart."""
    return {
        "device": plan.device,
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": fields(Path("/proc/meminfo")).get("MemTotal:"),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None
