import mmap
from pathlib import Path

import pytest
import torch

from engine.device import DONE, CpuDevice, empty_pages, open_device
from engine.errors import ConfigError


@pytest.mark.parametrize(("num_rows", "row_bytes"), [(1, 1), (3, 4096), (5, 100), (2, 8192)])
def test_slabs_are_aligned_to_pages_and_hold_what_is_written(num_rows: int, row_bytes: int) -> None:
    device = CpuDevice()
    for slab in (device.empty_bytes(num_rows, row_bytes), device.empty_host_bytes(num_rows, row_bytes)):
        assert slab.shape == (num_rows, row_bytes)
        assert slab.dtype is torch.uint8
        assert slab.device.type == "cpu"
        assert slab.data_ptr() % mmap.PAGESIZE == 0
        for row in range(num_rows):
            slab[row] = row + 1
        assert slab.sum(dim=1).tolist() == [(row + 1) * row_bytes for row in range(num_rows)]


def test_a_row_keeps_its_pages_alive() -> None:
    row = empty_pages(2, 4096)[1]
    others = [empty_pages(2, 4096).fill_(7) for _ in range(10)]
    row.fill_(3)
    assert bool((row == 3).all())
    assert all(bool((other == 7).all()) for other in others)


def test_pages_start_as_zeros() -> None:
    assert not empty_pages(3, 4096).any()


def test_a_copy_on_a_cpu_is_done_when_it_returns() -> None:
    device = CpuDevice()
    source = torch.arange(64, dtype=torch.uint8)
    destination = device.empty_bytes(1, 64)[0]
    event = device.copy(destination, source)
    assert torch.equal(destination, source)
    event.synchronize()


def test_a_cpu_waits_in_the_calling_thread() -> None:
    waited: list[str] = []

    class Watched:
        def __init__(self, name: str) -> None:
            self.name = name

        def synchronize(self) -> None:
            waited.append(self.name)

    device = CpuDevice()
    device.copy_waits_for(Watched("copy"))
    device.compute_waits_for(Watched("compute"))
    assert waited == ["copy", "compute"]
    assert device.record_compute() is DONE


def test_free_memory_counts_the_page_cache_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(
        "MemTotal:       49368000 kB\nMemFree:          100000 kB\nMemAvailable:   17073592 kB\nHugePages_Total:   0\n"
    )
    monkeypatch.setattr("engine.device.MEMINFO", meminfo)
    assert CpuDevice().free_bytes() == 17073592 * 1024


def test_free_memory_of_this_machine_is_plausible() -> None:
    assert 0 < CpuDevice().free_bytes() < 2**50


def test_cuda_where_there_is_none_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device is 'cuda', .* use --device cpu or --device auto"):
        open_device("cuda")


def test_auto_takes_the_cpu_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert open_device("auto").kind == "cpu"


def test_a_cpu_can_be_asked_for_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    device = open_device("cpu")
    assert device.kind == "cpu"
    assert device.torch_device == torch.device("cpu")
    assert device.describe().startswith("CPU (")
