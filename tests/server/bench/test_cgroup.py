"""Control groups in a tree of files that a temporary directory holds; and real ones where they can be made."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.cgroups import V1, V2, CgroupFiles
from server.bench import cgroup
from server.bench.cgroup import MemoryGroups

MB = 2**20
MOUNTS = {
    V1: "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
    V2: "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
}
PATHS = {V1: "4:memory:/app/own\n", V2: "0::/app/own\n"}
POINTS = {V1: "sys/fs/cgroup/memory", V2: "sys/fs/cgroup"}


class FakeKernel:
    """Fills directories that are made below it as the kernel would, where the parent has the memory controller."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.really_mkdir, self.really_rmdir = os.mkdir, os.rmdir
        self.controlled: set[Path] = set()
        self.num_busy = 0
        """How often a removal is refused."""

    def mount(self, files: CgroupFiles, controlled: str) -> Path:
        """The process is in /app/own; in `controlled`, and in none around or below it, groups get their files."""
        (self.root / "proc/self").mkdir(parents=True, exist_ok=True)
        (self.root / "proc/self/cgroup").write_text(PATHS[files])
        (self.root / "proc/self/mountinfo").write_text(MOUNTS[files])
        (self.root / POINTS[files] / "app/own").mkdir(parents=True)
        self.controlled.add(self.root / POINTS[files] / controlled)
        self.files = files
        return self.root / POINTS[files] / controlled

    def mkdir(self, name: str, mode: int = 0o777) -> None:
        self.really_mkdir(name, mode)
        path = Path(name)
        if path.parent in self.controlled:
            (path / self.files.limit).write_text("max")
            (path / "cgroup.procs").write_text("")

    def rmdir(self, name: str) -> None:
        if self.num_busy:
            self.num_busy -= 1
            raise OSError(16, "Device or resource busy")
        for file in Path(name).iterdir():
            file.unlink()
        self.really_rmdir(name)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    kernel = FakeKernel(tmp_path)
    monkeypatch.setattr(os, "mkdir", kernel.mkdir)
    monkeypatch.setattr(os, "rmdir", kernel.rmdir)
    monkeypatch.setattr(cgroup, "RETRY_SECONDS", 0.0)
    return kernel


@pytest.mark.parametrize(("files", "version"), [(V1, 1), (V2, 2)])
def test_a_group_is_made_where_it_has_a_limit(kernel: FakeKernel, files: CgroupFiles, version: int) -> None:
    """Not in the process's own group: of version 2, it has processes and so no controller for others."""
    parent = kernel.mount(files, "app")
    with MemoryGroups(kernel.root) as groups:
        assert groups.version == version
        assert list((parent / "own").iterdir()) == []
        group, other = groups.make(100 * MB), groups.make(200 * MB)
        assert group is not None
        assert other is not None
        assert group.path.parent == other.path.parent == parent
        assert (group.path / files.limit).read_text() == str(100 * MB)
        assert group.num_kills == 0
        (group.path / files.kills).write_text("under_oom 0\noom_kill 2\n")
        assert group.num_kills == 2
        groups.remove(group)
        assert not group.path.exists()
        assert other.path.exists()
    assert list(parent.glob("specter-*")) == []


def test_groups_are_removed_where_the_work_fails_and_in_spite_of_a_busy_kernel(kernel: FakeKernel) -> None:
    parent = kernel.mount(V1, "app")

    def work() -> None:
        with MemoryGroups(kernel.root) as groups:
            groups.make(MB)
            kernel.num_busy = 3
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert (kernel.num_busy, list(parent.glob("specter-*"))) == (0, [])


def test_what_cannot_be_removed_is_said(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.mount(V1, "app")
    monkeypatch.setattr(cgroup, "REMOVAL_SECONDS", -1.0)
    with caplog.at_level(logging.WARNING), MemoryGroups(kernel.root) as groups:
        groups.make(MB)
        kernel.num_busy = 1
    assert "cannot be removed: Device or resource busy" in caplog.text


def test_what_still_runs_in_a_group_is_ended(kernel: FakeKernel) -> None:
    kernel.mount(V1, "app")
    with subprocess.Popen(["sleep", "60"]) as process:
        with MemoryGroups(kernel.root) as groups:
            group = groups.make(MB)
            assert group is not None
            (group.path / "cgroup.procs").write_text(f"{process.pid}\n")
        assert process.wait() == -9


def test_where_no_group_can_be_made_the_reason_is_kept(kernel: FakeKernel) -> None:
    with MemoryGroups(kernel.root) as groups:
        assert groups.reason == "there is no control group for memory here"
        assert (groups.version, groups.make(MB)) == (None, None)
    mounted = kernel.mount(V2, "nowhere")
    with MemoryGroups(kernel.root) as groups:
        assert groups.make(MB) is None
        assert groups.reason == f"{mounted.parent}: No such file or directory"
        assert list(mounted.parent.glob("**/specter-*")) == []


@pytest.fixture
def real_groups() -> Iterator[MemoryGroups]:
    with MemoryGroups() as groups:
        if groups.version is None:
            pytest.skip(f"no memory cgroup can be made here: {groups.reason}")
        yield groups


def test_a_command_runs_inside_the_group_and_is_held_to_its_limit(real_groups: MemoryGroups) -> None:
    group = real_groups.make(64 * MB)
    assert group is not None
    code = "import os; print(open('/proc/self/cgroup').read(), os.getpid(), flush=True); bytearray(100 * 2**20)"
    command = group.command([sys.executable, "-c", code])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        *_, last = (output := process.stdout.read()).split()
        assert group.path.name in output
        # The wrapper has become the command: signals and the number of the process are the engine's own.
        assert int(last) == process.pid
        assert process.wait() == -9
    assert group.num_kills == 1
    real_groups.remove(group)
    assert not os.path.exists(group.path)
