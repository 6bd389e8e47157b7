import errno
import logging
import mmap
import weakref
from pathlib import Path
from weakref import WeakSet

import pytest
import torch

from engine.config import DeviceName
from engine.device import DONE, CpuDevice, CudaDevice, Device, empty_pages, open_device
from engine.errors import ConfigError, InsufficientMemoryError


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


def test_pages_are_private_to_the_process() -> None:
    pages = empty_pages(3, 4096)
    # As in "7f12a4000000-7f12a4003000 rw-p 00000000 00:00 0".
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(address, 16) for address in line.split()[0].split("-"))
        if start <= pages.data_ptr() < end:
            assert line.split()[1] == "rw-p"
            return
    raise AssertionError("the pages are not mapped")


def test_huge_pages_are_asked_for_and_can_be_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    advice: list[int] = []

    class WatchedMapping(mmap.mmap):
        def madvise(self, option: int, *args: int) -> None:
            advice.append(option)
            raise OSError(errno.EINVAL, "no huge pages here")

    monkeypatch.setattr("engine.device.mmap.mmap", WatchedMapping)
    assert empty_pages(3, 4096).sum().item() == 0
    assert advice == [mmap.MADV_HUGEPAGE]


def test_memory_that_the_system_refuses_is_an_error_with_the_way_out() -> None:
    with pytest.raises(InsufficientMemoryError) as caught:
        empty_pages(2**20, 2**26)
    assert str(caught.value) == (
        "70368744 MB of host memory cannot be had at once (Cannot allocate memory); "
        "lower --device-memory or --host-memory, or free some."
    )


def test_host_memory_of_a_cpu_needs_no_release() -> None:
    device = CpuDevice()
    pages = device.empty_host_bytes(2, 4096).fill_(5)
    device.release_host_bytes(pages)
    assert bool((pages == 5).all())


class FakeCudart:
    """What torch shows of the CUDA runtime; a failed call leaves an error to be raised by the next kernel."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.limit_bytes = 2**20
        self.has_error = False

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if num_bytes > self.limit_bytes:
            self.has_error = True
            return 2
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def zeros(self, *args: object, **kwargs: object) -> torch.Tensor:
        had_error, self.has_error = self.has_error, False
        if had_error:
            raise RuntimeError("CUDA error: out of memory")
        return torch.empty(1)


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    cudart = FakeCudart()
    monkeypatch.setattr("torch.cuda.cudart", lambda: cudart)
    monkeypatch.setattr("torch.cuda.Stream", lambda device: None)
    monkeypatch.setattr("torch.zeros", cudart.zeros)
    return cudart


def test_host_memory_for_cuda_is_page_locked_until_it_is_released(
    cudart: FakeCudart, caplog: pytest.LogCaptureFixture
) -> None:
    device = CudaDevice()
    first, second = device.empty_host_bytes(2, 4096), device.empty_host_bytes(1, 100)
    assert cudart.registered == {first.data_ptr(): 8192, second.data_ptr(): 100}
    device.release_host_bytes(first)
    assert cudart.registered == {second.data_ptr(): 100}
    device.release_host_bytes(second)
    assert not cudart.registered
    assert not caplog.text


def test_page_locked_memory_stays_mapped_until_it_is_released(
    cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    mappings: WeakSet[mmap.mmap] = WeakSet()

    class WatchedMapping(mmap.mmap):
        def __init__(self, *args: object, **kwargs: object) -> None:
            mappings.add(self)

    monkeypatch.setattr("engine.device.mmap.mmap", WatchedMapping)
    device = CudaDevice()
    pages = device.empty_host_bytes(2, 4096)
    weak_pages = weakref.ref(pages)
    del pages
    assert len(mappings) == 1
    held = weak_pages()
    assert held is not None
    device.release_host_bytes(held)
    del held
    assert not mappings


def test_memory_that_cannot_be_page_locked_is_pageable_and_says_so(
    cudart: FakeCudart, caplog: pytest.LogCaptureFixture
) -> None:
    device = CudaDevice()
    with caplog.at_level(logging.WARNING):
        pages = device.empty_host_bytes(3, 2**20)
    assert [record.message for record in caplog.records] == [
        "3145728 bytes of host memory could not be page-locked, so copies from there to the GPU will be slower; "
        "raise the limit on locked memory (ulimit -l unlimited, or docker run --ulimit memlock=-1)"
    ]
    assert not cudart.has_error, "the next kernel would raise the error of the registration"
    assert pages.fill_(1).sum().item() == 3 * 2**20
    device.release_host_bytes(pages)


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


def test_the_memory_of_a_cpu_is_that_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.device.available_bytes", lambda: 1234)
    assert CpuDevice().free_bytes() == 1234


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


@pytest.fixture
def opened(device: DeviceName) -> Device:
    return open_device(device)


def test_a_copy_arrives_on_the_device(opened: Device) -> None:
    records, slots = opened.empty_host_bytes(2, 4096), opened.empty_bytes(3, 4096).fill_(9)
    records[1] = torch.arange(4096) % 251
    opened.copy(slots[1], records[1]).synchronize()
    assert torch.equal(slots[1].cpu(), records[1])
    assert slots[0].unique().tolist() == slots[2].unique().tolist() == [9]
    opened.release_host_bytes(records)


def test_what_is_sent_to_the_host_is_what_was_computed(opened: Device) -> None:
    numbers = torch.arange(12, device=opened.torch_device).view(3, 4)
    copies = [opened.to_host(numbers * 2), opened.to_host(numbers.T), opened.to_host(numbers[:0])]
    assert all(copy.tensor().device.type == "cpu" for copy in copies)
    expected = torch.arange(12).view(3, 4)
    assert torch.equal(copies[0].tensor(), expected * 2)
    assert torch.equal(copies[1].tensor(), expected.T)
    assert copies[2].tensor().shape == (0, 4)


def test_events_of_an_idle_device_are_done(opened: Device) -> None:
    opened.copy_waits_for(opened.record_compute())
    opened.compute_waits_for(DONE)
    opened.record_compute().synchronize()
    assert 0 < opened.free_bytes() < 2**50
