"""No slot is read before its transfer is done or overwritten while in use, and transfers overlap compute."""

from pathlib import Path

import pytest
import torch

from engine.device import Event
from engine.experts.cache import ExpertCache
from engine.experts.layout import ExpertId, ExpertLayout, LayerLayout
from engine.experts.policy import PerLayerLru
from engine.experts.store import ExpertStore, HostStore
from engine.experts.transfer import ExpertTransfers
from tests.engine.harness import ignore_progress, load, running_core
from tests.engine.stepped_device import SteppedDevice
from tests.engine.tiny import random_prompt, reference_tokens

NUM_LAYERS, NUM_EXPERTS = 3, 4
LAYOUT = ExpertLayout(
    tuple(LayerLayout.of({"up_proj": torch.zeros(NUM_EXPERTS, 8, 8)}, False) for _ in range(NUM_LAYERS))
)


class Bench:
    """Transfers over a stepped device, without threads: every move is made by the test."""

    def __init__(self, num_slots: int) -> None:
        self.device = SteppedDevice()
        records = self.device.empty_host_bytes(LAYOUT.num_experts, LAYOUT.expert_bytes)
        for index, record in enumerate(records):
            record.fill_(index)
        slab = self.device.empty_bytes(num_slots, LAYOUT.expert_bytes)
        cache = ExpertCache(slab, PerLayerLru(num_slots, NUM_LAYERS))
        self.transfers = ExpertTransfers(cache, HostStore(self.device, LAYOUT, records), self.device)

    def enqueue_all(self) -> int:
        """Enqueue transfers while there are slots for them; how many."""
        count = 0
        while self.transfers.transfer_next() is not None:
            count += 1
        return count

    def visit(self, layer: int, experts: list[int]) -> None:
        """Visit experts, all of which must have been enqueued, and check that their bytes are there."""

        def compute(expert: int, record: torch.Tensor) -> None:
            assert record.unique().tolist() == [LAYOUT.record_index(ExpertId(layer, expert))]

        self.transfers.visit(layer, experts, compute)


def test_compute_waits_for_its_own_experts_and_not_for_those_of_later_layers() -> None:
    bench = Bench(num_slots=4)
    bench.transfers.plan([ExpertId(0, 0), ExpertId(0, 1), ExpertId(1, 0), ExpertId(1, 1)])
    assert bench.enqueue_all() == 4
    bench.visit(0, [0, 1])
    assert bench.device.log == ["copy", "compute", "copy", "compute"]
    assert len(bench.device.copies) == 2


def test_planned_transfers_proceed_while_compute_runs() -> None:
    bench = Bench(num_slots=4)
    bench.transfers.plan([ExpertId(0, 0), ExpertId(1, 0), ExpertId(2, 0)])
    assert bench.enqueue_all() == 3
    bench.visit(0, [0])
    assert len(bench.device.computes) == 1
    assert bench.device.advance_copies()
    assert bench.device.advance_copies()
    assert len(bench.device.computes) == 1
    assert bench.device.log == ["copy", "compute", "copy", "copy"]


def test_a_plan_larger_than_the_slots_streams_through_them() -> None:
    bench = Bench(num_slots=2)
    bench.transfers.plan([ExpertId(layer, expert) for layer in range(NUM_LAYERS) for expert in (0, 1)])
    for layer in range(NUM_LAYERS):
        assert bench.enqueue_all() == 2
        bench.visit(layer, [0, 1])
    assert bench.transfers.stats().num_demand_fetches == 0
    assert bench.transfers.stats().num_prefetches_used == 2 * NUM_LAYERS


def test_a_slot_is_overwritten_only_after_the_compute_that_read_it() -> None:
    bench = Bench(num_slots=1)
    bench.transfers.plan([ExpertId(0, 0)])
    bench.enqueue_all()
    bench.visit(0, [0])
    bench.transfers.plan([ExpertId(1, 0)])
    assert bench.enqueue_all() == 1
    assert not bench.device.advance_copies()
    assert bench.device.finish_compute()
    assert bench.device.advance_copies()
    bench.visit(1, [0])


class ForgetfulStore:
    """A store that enqueues its copies ahead of what they should wait for, to see that the device notices."""

    def __init__(self, store: ExpertStore, device: SteppedDevice) -> None:
        self.store = store
        self.device = device

    def fetch(self, expert: ExpertId, destination: torch.Tensor) -> Event:
        self.device.copies.clear()
        return self.store.fetch(expert, destination)

    def close(self) -> None:
        self.store.close()


def test_the_stepped_device_notices_a_copy_that_does_not_wait() -> None:
    bench = Bench(num_slots=1)
    bench.transfers._store = ForgetfulStore(bench.transfers._store, bench.device)
    bench.transfers.plan([ExpertId(0, 0)])
    bench.enqueue_all()
    bench.visit(0, [0])
    bench.transfers.plan([ExpertId(1, 0)])
    bench.enqueue_all()
    with pytest.raises(AssertionError, match="in use"):
        bench.device.advance_copies()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_parity_for_any_order_of_the_device(mixtral: Path, model_cache: Path, seed: int, num_slots: int) -> None:
    prompt = random_prompt(0, 7)
    model, config = load(mixtral, model_cache)
    device = SteppedDevice(seed)
    with model.pack.open_records() as records:
        store = HostStore.load(device, model.pack.layout, records, ignore_progress)
    with running_core(model, config, num_slots, device=device, store=store) as running:
        reply = running.generate(prompt, 12, ignore_eos=True)
    assert reply.token_ids == reference_tokens(mixtral, prompt, 12, ignore_eos=True)
