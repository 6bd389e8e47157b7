"""How much memory the operating system leaves this process.

The machine's free memory is half of the answer; the other half are the limits of control groups.
"""

import os
import resource
from pathlib import Path

from engine import cgroups
from engine.cgroups import fields


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process could still allocate, in bytes, by the machine and by every control group it is in.

    `root` is the file system's.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Not MemFree: that leaves out the page cache, which the kernel gives back on demand.
    free = fields(root / "proc/meminfo").get("MemAvailable:", machine)
    room = cgroups.free_bytes(root)
    return max(0, free if room is None else min(free, room))


def peak_bytes() -> int:
    """The most memory that this process has had resident so far, in bytes."""
    # The kernel starts `ru_maxrss` at the peak of the process that started this one; VmHWM starts anew.
    peak = fields(Path("/proc/self/status")).get("VmHWM:")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak
