"""On a GPU: its two queues run beside each other, and are ordered where events say so."""

from typing import Any

import pytest
import torch

from engine.device import Device, open_device
from engine.errors import ConfigError

pytestmark = pytest.mark.gpu

NUM_BYTES = 2**28
"""So many take some milliseconds to copy."""


@pytest.fixture(scope="module")
def cuda() -> Device:
    try:
        return open_device("cuda")
    except ConfigError:
        pytest.skip("no CUDA device")


@pytest.fixture
def work(cuda: Device) -> torch.Tensor:
    """[4096, 4096] for `keep_busy`, whose first product, which takes long to start, is done."""
    work = torch.zeros(4096, 4096, device=cuda.torch_device)
    work @ work
    cuda.record_compute().synchronize()
    return work


def keep_busy(work: torch.Tensor) -> None:
    """Enqueue compute of about a tenth of a second or more; returns at once."""
    for _ in range(50):
        work = work @ work


def is_done(event: Any) -> bool:
    done: bool = event.query()
    return done


def host_bytes(cuda: Device, value: int) -> torch.Tensor:
    return cuda.empty_host_bytes(1, NUM_BYTES).fill_(value)[0]


def test_host_memory_is_page_locked_until_it_is_released(cuda: Device) -> None:
    pages = cuda.empty_host_bytes(3, 5000)
    assert pages.is_pinned()
    cuda.release_host_bytes(pages)
    assert not pages.is_pinned()


def test_routes_are_sent_to_page_locked_memory_without_waiting(cuda: Device, work: torch.Tensor) -> None:
    numbers = torch.arange(6, device=cuda.torch_device)
    keep_busy(work)
    copy = cuda.to_host(numbers + 1)
    assert not is_done(copy.arrived)
    assert copy.destination.is_pinned()
    assert copy.tensor().tolist() == [1, 2, 3, 4, 5, 6]
    assert is_done(copy.arrived)


def test_copies_run_while_compute_does(cuda: Device, work: torch.Tensor) -> None:
    source, slot = host_bytes(cuda, 1), cuda.empty_bytes(1, NUM_BYTES)[0]
    keep_busy(work)
    computed = cuda.record_compute()
    cuda.copy(slot[:4096], source[:4096]).synchronize()
    assert not is_done(computed)
    cuda.release_host_bytes(source)


def test_compute_waits_for_the_copy_that_fills_a_slot(cuda: Device) -> None:
    source, slot = host_bytes(cuda, 1), cuda.empty_bytes(1, NUM_BYTES)[0].zero_()
    cuda.record_compute().synchronize()
    filled = cuda.copy(slot, source)
    assert not is_done(filled)
    cuda.compute_waits_for(filled)
    assert cuda.to_host(slot.sum()).tensor().item() == NUM_BYTES
    cuda.release_host_bytes(source)


def test_a_copy_waits_for_the_compute_that_reads_the_slot(cuda: Device, work: torch.Tensor) -> None:
    source, slot = host_bytes(cuda, 2), cuda.empty_bytes(1, NUM_BYTES)[0].fill_(1)
    keep_busy(work)
    total = cuda.to_host(slot.sum())
    cuda.copy_waits_for(cuda.record_compute())
    filled = cuda.copy(slot, source)
    assert not is_done(total.arrived)
    assert total.tensor().item() == NUM_BYTES
    filled.synchronize()
    assert slot.unique().tolist() == [2]
    cuda.release_host_bytes(source)
