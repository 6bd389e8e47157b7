"""Fake file systems with control groups of all kinds; and, where one can be made, a real group with a limit."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.host_memory import available_bytes, peak_bytes

MB = 2**20
FREE = 900 * MB
V1_UNLIMITED = 9223372036854771712

PROC = "22 27 0:21 / /proc rw,relatime - proc proc rw"
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 master:3 - cgroup cgroup rw,memory"
CPU_MOUNT = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"
UNIFIED_MOUNT = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"


class FakeSystem:
    """The root of a file system that holds what the kernel would show; groups are named by their directories."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal:  2000000 kB\nMemFree:  1000 kB\nMemAvailable:  {FREE // 1024} kB\n")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def process(self, cgroup: str, *mounts: str) -> None:
        self.write("proc/self/cgroup", cgroup)
        self.write("proc/self/mountinfo", "".join(f"{mount}\n" for mount in (PROC, *mounts)))

    def v2(self, group: str, limit: int | str, usage: int, *, inactive: int = 0, active: int = 0) -> None:
        self.write(f"{group}/memory.max", f"{limit}\n")
        self.write(f"{group}/memory.current", f"{usage}\n")
        # "file" counts shared memory too, which cannot be taken back.
        self.write(
            f"{group}/memory.stat",
            f"anon 5\nfile {500 * MB}\nshmem {400 * MB}\ninactive_file {inactive}\nactive_file {active}\n",
        )

    def v1(self, group: str, limit: int, usage: int, *, inactive: int = 0, active: int = 0) -> None:
        self.write(f"{group}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{group}/memory.usage_in_bytes", f"{usage}\n")
        self.write(
            f"{group}/memory.stat",
            f"cache {500 * MB}\ninactive_file {9 * MB}\nactive_file {9 * MB}\n"
            f"total_inactive_file {inactive}\ntotal_active_file {active}\n",
        )

    @property
    def available(self) -> int:
        return available_bytes(self.root)


@pytest.fixture
def system(tmp_path: Path) -> FakeSystem:
    return FakeSystem(tmp_path)


def test_without_control_groups_it_is_what_the_machine_has(system: FakeSystem) -> None:
    assert system.available == FREE
    system.process("")
    assert system.available == FREE


def test_v2_a_limit_less_what_is_used_and_cannot_be_taken_back(system: FakeSystem) -> None:
    system.process("0::/app\n", V2_MOUNT)
    system.v2("sys/fs/cgroup/app", 600 * MB, 250 * MB, inactive=30 * MB, active=20 * MB)
    assert system.available == (600 - 250 + 50) * MB


def test_v1_a_limit_less_what_is_used_and_cannot_be_taken_back(system: FakeSystem) -> None:
    system.process("5:cpu:/elsewhere\n4:memory:/app\n1:name=systemd:/\n", CPU_MOUNT, V1_MOUNT)
    system.v1("sys/fs/cgroup/memory/app", 600 * MB, 250 * MB, inactive=30 * MB, active=20 * MB)
    assert system.available == (600 - 250 + 50) * MB


def test_controllers_may_share_a_hierarchy(system: FakeSystem) -> None:
    system.process("4:cpuset,memory:/app\n", V1_MOUNT.replace("rw,memory", "rw,cpuset,memory"))
    system.v1("sys/fs/cgroup/memory/app", 600 * MB, 0)
    assert system.available == 600 * MB


@pytest.mark.parametrize("tightest", ["", "/outer", "/outer/inner"])
def test_v2_the_tightest_of_nested_limits_counts(system: FakeSystem, tightest: str) -> None:
    system.process("0::/outer/inner\n", V2_MOUNT)
    for group in ("", "/outer", "/outer/inner", "/outer/other"):
        limit = 300 if group == tightest else 700
        system.v2(f"sys/fs/cgroup{group}", 10 * MB if group == "/outer/other" else limit * MB, 100 * MB)
    assert system.available == 200 * MB


@pytest.mark.parametrize("tightest", ["", "/outer", "/outer/inner"])
def test_v1_the_tightest_of_nested_limits_counts(system: FakeSystem, tightest: str) -> None:
    system.process("4:memory:/outer/inner\n", V1_MOUNT)
    for group in ("", "/outer", "/outer/inner"):
        limit = 300 * MB if group == tightest else V1_UNLIMITED
        system.v1(f"sys/fs/cgroup/memory{group}", limit, 100 * MB)
    assert system.available == 200 * MB


def test_groups_without_a_limit_leave_what_the_machine_has(system: FakeSystem) -> None:
    system.process("4:memory:/app\n0::/app\n", V1_MOUNT, UNIFIED_MOUNT)
    system.v1("sys/fs/cgroup/memory/app", V1_UNLIMITED, 100 * MB)
    system.v2("sys/fs/cgroup/unified/app", "max", 100 * MB)
    assert system.available == FREE


def test_a_limit_above_what_the_machine_has_changes_nothing(system: FakeSystem) -> None:
    system.process("0::/app\n", V2_MOUNT)
    system.v2("sys/fs/cgroup/app", 2000 * MB, 100 * MB)
    assert system.available == FREE


def test_a_group_beyond_its_limit_has_nothing_left(system: FakeSystem) -> None:
    system.process("0::/app\n", V2_MOUNT)
    system.v2("sys/fs/cgroup/app", 100 * MB, 120 * MB)
    assert system.available == 0


def test_a_hybrid_machine_has_its_limits_in_v1(system: FakeSystem) -> None:
    system.process("4:memory:/app\n0::/app\n", CPU_MOUNT, V1_MOUNT, UNIFIED_MOUNT)
    system.v1("sys/fs/cgroup/memory/app", 300 * MB, 100 * MB)
    system.write("sys/fs/cgroup/unified/app/cgroup.procs", "1\n")
    assert system.available == 200 * MB


@pytest.mark.parametrize(
    ("cgroup", "top"),
    [
        # The whole path is shown, but only the container's part is mounted.
        ("0::/docker/1f2e\n", "/docker/1f2e"),
        # The path is the host's, the mount's root the container's own.
        ("0::/docker/1f2e\n", "/"),
        # The container's namespace begins at its own group.
        ("0::/\n", "/"),
        # The process was moved out of the namespace's root.
        ("0::/../elsewhere\n", "/"),
    ],
)
def test_in_a_container_the_mount_point_is_its_own_group(system: FakeSystem, cgroup: str, top: str) -> None:
    system.process(cgroup, V2_MOUNT.replace(" / /sys", f" {top} /sys"))
    system.v2("sys/fs/cgroup", 300 * MB, 100 * MB)
    assert system.available == 200 * MB


def test_groups_below_a_containers_own_are_found(system: FakeSystem) -> None:
    system.process("4:memory:/docker/1f2e/job\n", V1_MOUNT.replace(" / /sys", " /docker/1f2e /sys"))
    system.v1("sys/fs/cgroup/memory", 500 * MB, 0)
    system.v1("sys/fs/cgroup/memory/job", 300 * MB, 0)
    assert system.available == 300 * MB


def test_of_several_mounts_the_one_with_the_group_counts(system: FakeSystem) -> None:
    other = "90 1 0:32 /lxc/other /var/lib/lxc/other/cgroup rw - cgroup cgroup rw,memory"
    system.process("4:memory:/app\n", other, V1_MOUNT)
    system.v1("var/lib/lxc/other/cgroup", 10 * MB, 0)
    system.v1("sys/fs/cgroup/memory/app", 300 * MB, 0)
    assert system.available == 300 * MB


def test_a_mount_point_may_have_a_space(system: FakeSystem) -> None:
    system.process("0::/app\n", V2_MOUNT.replace("/sys/fs/cgroup", "/my\\040groups"))
    system.v2("my groups/app", 300 * MB, 0)
    assert system.available == 300 * MB


@pytest.mark.parametrize("garbage", ["", "\n\n", "x", "-1", "0::", "0::/\0/app", "9" * 5000, "a - b", "\udcff: é\n"])
@pytest.mark.parametrize(
    "name", ["proc/self/cgroup", "proc/self/mountinfo", "sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"]
)
def test_files_that_say_nothing_set_no_limit(system: FakeSystem, name: str, garbage: str) -> None:
    system.process("0::/\n", V2_MOUNT)
    system.v2("sys/fs/cgroup", 300 * MB, 100 * MB)
    (system.root / name).write_bytes(garbage.encode(errors="surrogateescape"))
    # Whatever the path is, the mount point is the nearest group that is known.
    assert system.available == (200 * MB if garbage.startswith("0::") and name == "proc/self/cgroup" else FREE)


@pytest.mark.parametrize("garbage", ["", "MemAvailable:\n", "MemAvailable: many kB\n", "nonsense"])
def test_what_is_unknown_of_the_machine_is_bounded_by_its_memory(system: FakeSystem, garbage: str) -> None:
    system.write("proc/meminfo", garbage)
    assert system.available == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    system.process("0::/\n", V2_MOUNT)
    system.v2("sys/fs/cgroup", 300 * MB, 100 * MB)
    assert system.available == 200 * MB


def test_without_statistics_nothing_counts_as_reclaimable(system: FakeSystem) -> None:
    system.process("0::/\n", V2_MOUNT)
    system.v2("sys/fs/cgroup", 300 * MB, 100 * MB, inactive=50 * MB)
    (system.root / "sys/fs/cgroup/memory.stat").unlink()
    assert system.available == 200 * MB


def run_python(code: str) -> int:
    """What the code prints, run by another process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_the_peak_of_a_process_is_its_own_and_remembered() -> None:
    held = bytearray(b"x") * (200 * MB)
    assert peak_bytes() > 200 * MB
    del held
    assert peak_bytes() > 200 * MB
    assert run_python("from engine.host_memory import peak_bytes; print(peak_bytes())") < 100 * MB


class LimitedGroup(NamedTuple):
    directory: Path
    limit_bytes: int

    def available_inside(self) -> int:
        """What a process in the group finds."""
        join = f"import os; open({str(self.directory / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
        return run_python(f"{join}\nfrom engine.host_memory import available_bytes\nprint(available_bytes())")


@pytest.fixture
def limited_group() -> Iterator[LimitedGroup]:
    """A control group of this machine within one that has the limit."""
    limit_bytes = 96 * MB
    for top, limit_file in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        outer = top / f"specter-test-{os.getpid()}"
        inner = outer / "inner"
        if not (top / "cgroup.procs").exists():
            continue
        try:
            inner.mkdir(parents=True)
            (outer / limit_file).write_text(str(limit_bytes))
            yield LimitedGroup(inner, limit_bytes)
            return
        except OSError:
            continue
        finally:
            for directory in (inner, outer):
                remove_group(directory)
    pytest.skip("no memory cgroup can be made here; it takes root and a writable cgroup file system")


def remove_group(directory: Path) -> None:
    """Remove a control group, which is busy for a moment after its last process has ended."""
    for _ in range(100):
        if not directory.exists():
            return
        try:
            directory.rmdir()
        except OSError:
            time.sleep(0.02)
    raise AssertionError(f"{directory} could not be removed")


def test_a_process_in_a_control_group_sees_at_most_its_limit(limited_group: LimitedGroup) -> None:
    available = limited_group.available_inside()
    assert limited_group.limit_bytes // 2 < available <= limited_group.limit_bytes
    assert available_bytes() > limited_group.limit_bytes
