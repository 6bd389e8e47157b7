import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import resident
from engine.host_memory import peak_bytes
from engine.resident import frugal_memory, peak_memory, release_freed_memory

MIB = 2**20
TOLERANCE = 8 * MIB


def resident_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def touch(num_bytes: int) -> torch.Tensor:
    return torch.ones(num_bytes, dtype=torch.uint8)


def test_the_peak_counts_what_is_freed_within_the_block() -> None:
    before = resident_bytes()
    with peak_memory() as peak:
        touch(100 * MIB)
    assert before + 100 * MIB - TOLERANCE < peak.num_bytes < before + 100 * MIB + TOLERANCE
    assert resident_bytes() < before + TOLERANCE


def test_what_was_before_the_block_does_not_count() -> None:
    touch(100 * MIB)
    before = resident_bytes()
    with peak_memory() as peak:
        touch(20 * MIB)
    assert peak.num_bytes < before + 20 * MIB + TOLERANCE


def test_what_comes_after_the_block_does_not_count() -> None:
    with peak_memory() as peak:
        before = resident_bytes()
    touch(100 * MIB)
    assert 0 < peak.num_bytes < before + TOLERANCE


def test_where_the_peak_cannot_be_reset_it_is_that_of_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resident, "CLEAR_REFS", tmp_path / "not-there" / "clear_refs")
    kept = touch(100 * MIB)
    del kept
    before = peak_bytes()
    with peak_memory() as peak:
        pass
    assert peak.num_bytes >= before


def test_an_error_in_the_block_is_what_it_is() -> None:
    with pytest.raises(ValueError, match="a bug"), frugal_memory(), peak_memory():
        raise ValueError("a bug")


FREES_AT_ONCE = """
import torch
from engine.resident import frugal_memory
from tests.engine.test_resident import MIB, TOLERANCE, resident_bytes, touch

with frugal_memory():
    before = resident_bytes()
    pieces = [touch(MIB) for _ in range(100)]
    kept = pieces[-1]
    assert resident_bytes() > before + 90 * MIB
    del pieces
    assert resident_bytes() < before + TOLERANCE
    assert bool(kept.all())
"""


def test_freed_memory_goes_back_at_once_though_something_behind_it_is_in_use() -> None:
    # In a process of its own, whose malloc has hoarded nothing that the pieces would fit into.
    subprocess.run([sys.executable, "-c", FREES_AT_ONCE], check=True)


def test_what_was_freed_can_be_given_back() -> None:
    before = resident_bytes()
    # Small enough for malloc to keep it, with something behind that is still in use.
    pieces = [touch(64 * 1024) for _ in range(1600)]
    kept = pieces[-1]
    del pieces
    release_freed_memory()
    assert resident_bytes() < before + TOLERANCE
    assert bool(kept.all())


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Musl:
        """Without `mallopt`."""

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Musl())
    with frugal_memory(), peak_memory() as peak:
        pass
    assert peak.num_bytes > 0
