import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path
from weakref import WeakSet

import pytest
import torch

from engine.device import CpuDevice, Device, empty_pages
from engine.errors import PackError
from engine.experts.layout import ExpertId, ExpertLayout, LayerLayout
from engine.experts.store import NUM_TRANSFERS, DiskStore, ExpertStore, HostStore, TieredStore, host_experts
from tests.engine.experts.files import LAYOUT, WrittenRecords, write_records
from tests.engine.stepped_device import SteppedDevice

EXPERTS = list(LAYOUT.experts())


@pytest.fixture
def written(tmp_path: Path) -> WrittenRecords:
    return write_records(tmp_path)


@pytest.fixture(params=[CpuDevice, SteppedDevice])
def device(request: pytest.FixtureRequest) -> Device:
    device = request.param()
    assert isinstance(device, Device)
    return device


def disk_store(written: WrittenRecords, device: Device) -> DiskStore:
    return DiskStore(written.open(), device)


def host_store(written: WrittenRecords, device: Device, experts: list[ExpertId] = EXPERTS) -> HostStore:
    with written.open() as file:
        return HostStore.load(device, file, experts, lambda count: None)


def tiered_store(written: WrittenRecords, device: Device) -> TieredStore:
    return TieredStore(host_store(written, device, host_experts(LAYOUT, 3)), disk_store(written, device))


OPENERS = [disk_store, host_store, tiered_store]
Opener = Callable[[WrittenRecords, Device], ExpertStore]


@pytest.mark.parametrize("open_store", OPENERS)
def test_stores_give_the_bytes_of_every_expert(open_store: Opener, written: WrittenRecords, device: Device) -> None:
    store = open_store(written, device)
    slots = device.empty_bytes(2, LAYOUT.expert_bytes)
    for index, expert in enumerate(EXPERTS):
        store.fetch(expert, slots[index % 2]).synchronize()
        assert torch.equal(slots[index % 2], written.record(expert))
    store.close()


@pytest.mark.parametrize("open_store", OPENERS)
def test_several_threads_fetch_at_once(open_store: Opener, written: WrittenRecords, device: Device) -> None:
    store = open_store(written, device)
    experts = EXPERTS * 8
    slots = device.empty_bytes(len(experts), LAYOUT.expert_bytes)
    with ThreadPoolExecutor(2 * NUM_TRANSFERS) as threads:
        events = list(threads.map(store.fetch, experts, slots))
    for event in events:
        event.synchronize()
    for expert, slot in zip(experts, slots, strict=True):
        assert torch.equal(slot, written.record(expert))
    store.close()


@pytest.mark.parametrize("open_store", OPENERS)
def test_a_closed_store_leaves_nothing_open(
    open_store: Opener, written: WrittenRecords, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    mappings: WeakSet[mmap] = WeakSet()

    class WatchedMapping(mmap):
        def __init__(self, *args: object, **kwargs: object) -> None:
            mappings.add(self)

    slot = device.empty_bytes(1, LAYOUT.expert_bytes)[0]
    num_threads, num_descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("engine.device.mmap.mmap", WatchedMapping)
    store = open_store(written, device)
    for expert in EXPERTS:
        store.fetch(expert, slot).synchronize()
    if isinstance(device, SteppedDevice):
        assert device.registered
        assert mappings
    store.close()
    if isinstance(device, SteppedDevice):
        assert not device.registered
    assert not mappings
    assert threading.active_count() == num_threads
    assert len(os.listdir("/proc/self/fd")) == num_descriptors


def test_a_host_store_holds_what_it_was_given_reports_each_and_outlives_the_file(
    written: WrittenRecords, device: Device
) -> None:
    experts, counts = [ExpertId(1, 3), ExpertId(0, 1), ExpertId(1, 0)], list[int]()
    with written.open() as file:
        store = HostStore.load(device, file, experts, counts.append)
    written.path.unlink()
    assert counts == [1, 2, 3]
    assert [expert for expert in EXPERTS if expert in store] == sorted(experts)
    slot = device.empty_bytes(1, LAYOUT.expert_bytes)[0]
    for expert in experts:
        store.fetch(expert, slot).synchronize()
        assert torch.equal(slot, written.record(expert))
    store.close()


def test_a_host_store_that_cannot_be_loaded_releases_its_memory(written: WrittenRecords) -> None:
    device = SteppedDevice()
    written.damage(ExpertId(1, 1))
    with pytest.raises(PackError, match="expert 1 of layer 1"):
        host_store(written, device)
    assert not device.registered


def test_on_a_cpu_experts_are_read_into_their_slots(written: WrittenRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()

    def fail(*args: object) -> None:
        raise AssertionError("staging memory and copies are not needed here")

    monkeypatch.setattr(device, "empty_host_bytes", fail)
    monkeypatch.setattr(device, "copy", fail)
    store = disk_store(written, device)
    slot = device.empty_bytes(1, LAYOUT.expert_bytes)[0]
    store.fetch(EXPERTS[4], slot)
    assert torch.equal(slot, written.record(EXPERTS[4]))
    store.close()


def test_staging_memory_is_one_allocation_of_a_few_records(written: WrittenRecords) -> None:
    device = SteppedDevice()
    store = disk_store(written, device)
    slots = device.empty_bytes(len(EXPERTS), LAYOUT.expert_bytes)
    for expert, slot in zip(EXPERTS, slots, strict=True):
        store.fetch(expert, slot).synchronize()
    assert list(device.registered.values()) == [NUM_TRANSFERS * LAYOUT.expert_bytes]
    store.close()


def test_a_staging_row_is_read_into_again_only_when_the_copy_out_of_it_is_done(written: WrittenRecords) -> None:
    device = SteppedDevice()
    store = disk_store(written, device)
    slots = device.empty_bytes(len(EXPERTS), LAYOUT.expert_bytes)
    for index in range(NUM_TRANSFERS):
        store.fetch(EXPERTS[index], slots[index])
    assert device.log == []
    for index in range(NUM_TRANSFERS, len(EXPERTS)):
        store.fetch(EXPERTS[index], slots[index])
        # The row whose copy is the oldest: the others go on in the meantime.
        assert device.log == ["copy"] * (index + 1 - NUM_TRANSFERS)
    while device.advance_copies():
        pass
    for expert, slot in zip(EXPERTS, slots, strict=True):
        assert torch.equal(slot, written.record(expert))
    store.close()


def test_a_failed_read_gives_its_staging_row_back(written: WrittenRecords) -> None:
    device = SteppedDevice()
    store = disk_store(written, device)
    slots = device.empty_bytes(2, LAYOUT.expert_bytes)
    written.damage(EXPERTS[0])
    store.fetch(EXPERTS[1], slots[0])

    def fail_and_fetch() -> None:
        for _ in range(2 * NUM_TRANSFERS):
            with pytest.raises(PackError):
                store.fetch(EXPERTS[0], slots[1])
        store.fetch(EXPERTS[2], slots[1]).synchronize()

    # In a thread that may be left behind, as what this is about would never end.
    thread = threading.Thread(target=fail_and_fetch, daemon=True)
    thread.start()
    thread.join(timeout=5)
    assert not thread.is_alive(), "no staging row is left"
    assert torch.equal(slots[0], written.record(EXPERTS[1]))
    assert torch.equal(slots[1], written.record(EXPERTS[2]))
    store.close()


@pytest.mark.parametrize("open_store", [disk_store, tiered_store])
def test_a_read_error_is_passed_on(open_store: Opener, written: WrittenRecords, device: Device) -> None:
    store = open_store(written, device)
    os.truncate(written.path, 0)
    with pytest.raises(OSError, match="ends at byte"):
        store.fetch(EXPERTS[-1], empty_pages(1, LAYOUT.expert_bytes)[0])
    store.close()


def test_a_tiered_store_reads_from_disk_only_what_is_not_in_host_memory(
    written: WrittenRecords, device: Device
) -> None:
    store = tiered_store(written, device)
    in_host = host_experts(LAYOUT, 3)
    os.truncate(written.path, 0)
    slot = device.empty_bytes(1, LAYOUT.expert_bytes)[0]
    for expert in EXPERTS:
        if expert in in_host:
            store.fetch(expert, slot).synchronize()
            assert torch.equal(slot, written.record(expert))
        else:
            with pytest.raises(OSError, match="ends at byte"):
                store.fetch(expert, slot)
    store.close()


def test_a_tiered_store_closes_the_disk_where_the_host_cannot_be_closed(
    written: WrittenRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SteppedDevice()
    host, disk = host_store(written, device), disk_store(written, device)

    def fail() -> None:
        raise RuntimeError("the device is broken")

    monkeypatch.setattr(host, "close", fail)
    with pytest.raises(RuntimeError, match="broken"):
        TieredStore(host, disk).close()
    assert len(device.registered) == 1


def test_host_memory_is_shared_evenly_by_the_layers() -> None:
    layers = tuple(LayerLayout.of({"up_proj": torch.empty(count, 8, 8)}, False) for count in (4, 1, 4))
    layout = ExpertLayout(layers)
    assert host_experts(layout, 0) == []
    assert host_experts(layout, 6) == [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2)]
    assert sorted(host_experts(layout, 9)) == list(layout.experts())
