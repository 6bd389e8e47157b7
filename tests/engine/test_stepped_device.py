"""No slot is read before its transfer is done or overwritten while in use, and transfers overlap compute.

Nor is anything that the device sends to the host read before it has arrived.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch

from engine.device import Event
from engine.experts.cache import ExpertCache
from engine.experts.layout import ExpertId, ExpertLayout, LayerLayout
from engine.experts.policy import ExpertIndex, PerLayerLru
from engine.experts.schedule import TransferSchedule
from engine.experts.store import ExpertStore, HostStore
from engine.experts.transfer import ExpertTransfers
from engine.model.dispatch import ExpertsModule
from engine.phases import PhaseClock
from engine.sampling import Choice
from engine.speculative.draft import QuantizedDrafter
from engine.speculative.governor import FixedLength
from engine.speculative.quantized import QuantizedExperts
from engine.trace import NO_TRACE
from tests.engine.harness import load, running_core
from tests.engine.stepped_device import SteppedDevice, SteppedEvent
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
        for number, record in enumerate(records):
            record.fill_(number)
        slab = self.device.empty_bytes(num_slots, LAYOUT.expert_bytes)
        index = ExpertIndex([NUM_EXPERTS] * NUM_LAYERS)
        policy = PerLayerLru(index, num_slots)
        schedule = TransferSchedule(ExpertCache(slab, index), policy, index, lambda expert: LAYOUT.expert_bytes)
        store = HostStore(self.device, list(LAYOUT.experts()), records)
        self.transfers = ExpertTransfers(schedule, store, self.device)

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

        self.transfers.visit(layer, {expert: [0] for expert in experts}, 1, compute)


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

    def is_divisible(self, expert: ExpertId) -> bool:
        return self.store.is_divisible(expert)

    def fetch(self, expert: ExpertId, destination: torch.Tensor, offset: int = 0) -> Event:
        self.device.copies.clear()
        return self.store.fetch(expert, destination, offset)

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
@pytest.mark.parametrize(("num_slots", "num_host_experts"), [(1, 18), (3, 7), (3, 18), (8, 0)])
def test_parity_for_any_order_of_the_device(
    mixtral: Path, model_cache: Path, seed: int, num_slots: int, num_host_experts: int
) -> None:
    prompt = random_prompt(0, 7)
    model, config = load(mixtral, model_cache)
    device = SteppedDevice(seed)
    assert model.draft is not None
    model = model._replace(draft=QuantizedExperts(model.draft.layers, device))
    with running_core(model, config, num_slots, device=device, num_host_experts=num_host_experts) as running:
        reply = running.generate(prompt, 12, ignore_eos=True)
    assert reply.token_ids == reference_tokens(mixtral, prompt, 12, ignore_eos=True)


def test_what_is_sent_to_the_host_arrives_when_the_compute_queue_gets_there() -> None:
    device = SteppedDevice()
    source = torch.tensor([3, 1, 2])
    copy = device.to_host(source)
    source.zero_()  # by compute that comes later in the queue
    assert copy.destination.tolist() == [-1, -1, -1]
    assert device.finish_compute()
    assert copy.tensor().tolist() == [3, 1, 2]
    assert device.to_host(source).tensor().tolist() == [0, 0, 0]


class WatchedDevice(SteppedDevice):
    """Notes in which phase somebody waits for it."""

    def __init__(self, clock: PhaseClock) -> None:
        super().__init__()
        self.clock = clock
        self.waits: list[str] = []

    def drive_until(self, event: SteppedEvent) -> None:
        self.waits.append(self.clock._open[-1])
        super().drive_until(event)


class WatchedExperts(QuantizedExperts):
    """Notes what the passes really route to."""

    routed: set[ExpertId]

    def __call__(
        self,
        module: ExpertsModule,
        layer: int,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        self.routed.update(ExpertId(layer, expert) for expert in top_k_index.flatten().tolist())
        return super().__call__(module, layer, hidden_states, top_k_index, top_k_weights)


class Plans:
    """Takes the place of the transfers, of which a draft uses no more."""

    moved_bytes = 0

    def __init__(self) -> None:
        self.plans: list[set[ExpertId]] = []

    def plan(self, predicted: Sequence[ExpertId]) -> int:
        self.plans.append(set(predicted))
        return 0


def test_routes_travel_while_a_token_is_chosen_and_are_planned_once_they_have_arrived(
    mixtral: Path, model_cache: Path
) -> None:
    loaded, _ = load(mixtral, model_cache)
    assert loaded.draft is not None
    clock, transfers = PhaseClock(), Plans()
    device = WatchedDevice(clock)
    experts = WatchedExperts(loaded.draft.layers, device)
    experts.routed = set()
    routed_before: list[set[ExpertId]] = []

    def choose(logits: torch.Tensor) -> Choice:
        assert len(device.computes) == 1, "the routes are under way, and nobody has waited for them"
        routed_before.append(set(experts.routed))
        return Choice(int(logits.argmax()), logits, 1.0)

    drafter = QuantizedDrafter(loaded.model, experts, cast(ExpertTransfers, transfers), clock, NO_TRACE)
    draft = drafter.propose([5], 3, choose, loaded.model.new_cache(100), FixedLength(8))
    assert len(draft.token_ids) == 3
    assert transfers.plans == [*routed_before, experts.routed]
    assert device.waits == ["draft"] * 4
