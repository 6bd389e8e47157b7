"""Assembles the engine: the place that names concrete classes and divides the memory."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from engine.config import EngineConfig
from engine.core import CoreLimits, EngineCore
from engine.device import Device, open_device
from engine.experts.cache import ExpertCache
from engine.experts.planner import PrefillPlanner
from engine.experts.policy import PerLayerLru
from engine.experts.store import DiskStore, ExpertStore, HostStore
from engine.experts.transfer import ExpertTransfers
from engine.loading import LoadedModel, load_model
from engine.memory import MemoryNeeds, MemoryPlan, memory_rows, plan_memory
from engine.packing import Pack
from engine.phases import PhaseClock
from engine.protocol import Capabilities, Loading, MemoryRow, OnProgress
from engine.speculative.draft import Drafter
from engine.speculative.verify import CachedExperts

NUM_TRANSFER_THREADS = 2
"""Two transfers in flight: the slow tier works on one while the other is handed over."""


class Engine(NamedTuple):
    core: EngineCore
    capabilities: Capabilities


@contextmanager
def open_engine(config: EngineConfig, on_progress: OnProgress) -> Iterator[Engine]:
    """Load the model and start the transfer threads; both end with the block. Raises `SpecterError`."""
    device = open_device(config.device)
    loaded = load_model(config, device, on_progress)
    needs = memory_needs(loaded, config)
    memory = plan_memory(
        needs,
        expert_bytes=loaded.pack.layout.expert_bytes,
        num_experts=loaded.pack.layout.num_experts,
        # Without the type of the settings, which msgspec does not encode.
        budget_bytes=None if config.device_memory is None else int(config.device_memory),
        # The budget covers what is loaded already, so that counts as free.
        free_bytes=device.free_bytes() + needs.dense + needs.draft,
        is_cuda=device.kind == "cuda",
    )
    with ExitStack() as stack:
        store = open_store(loaded.pack, device, on_progress)
        stack.callback(store.close)
        transfers = open_transfers(loaded, memory.num_slots, store, device)
        stack.callback(transfers.close)
        core = assemble_core(loaded, transfers, config)
        yield Engine(core, describe(loaded, config, device, needs, memory))


def memory_needs(loaded: LoadedModel, config: EngineConfig) -> MemoryNeeds:
    """What the model wants on the device besides slots, in bytes."""
    text_config = loaded.model.config.get_text_config()
    # Activations of a prefill chunk: residual stream and projections, expert outputs; and the logits of a verify pass.
    rows = config.prefill_chunk_tokens * text_config.hidden_size * (8 + 2 * loaded.probe.top_k)
    logits = (config.draft_length + 1) * loaded.vocab_size
    return MemoryNeeds(
        dense=loaded.model.num_bytes,
        draft=loaded.draft.num_bytes if loaded.draft else 0,
        kv_cache=loaded.max_model_len * loaded.probe.kv_bytes_per_token,
        workspace=loaded.codec.num_bytes + rows * loaded.dtype.itemsize + 4 * logits * 4,
    )


def open_store(pack: Pack, device: Device, on_progress: OnProgress) -> ExpertStore:
    """On CUDA the experts are in host memory; on a CPU that is the device's own, so they stay on disk."""
    records = pack.open_records()
    if device.kind == "cpu":
        return DiskStore(records)
    with records:
        return HostStore.load(
            device,
            pack.layout,
            records,
            lambda done: on_progress(Loading("Loading experts into host memory", done, pack.layout.num_experts)),
        )


def open_transfers(loaded: LoadedModel, num_slots: int, store: ExpertStore, device: Device) -> ExpertTransfers:
    """Slots, and the threads that fill them; the caller closes it before the store."""
    layout = loaded.pack.layout
    cache = ExpertCache(device.empty_bytes(num_slots, layout.expert_bytes), PerLayerLru(num_slots, len(layout.layers)))
    transfers = ExpertTransfers(cache, store, device)
    transfers.start(NUM_TRANSFER_THREADS)
    return transfers


def assemble_core(loaded: LoadedModel, transfers: ExpertTransfers, config: EngineConfig) -> EngineCore:
    clock = PhaseClock()
    return EngineCore(
        model=loaded.model,
        experts=CachedExperts(transfers, loaded.codec),
        drafter=Drafter(loaded.model, loaded.draft, transfers, clock) if loaded.draft else None,
        transfers=transfers,
        prefill_planner=PrefillPlanner(loaded.pack.layout, loaded.probe.top_k),
        clock=clock,
        limits=CoreLimits(
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            draft_length=config.draft_length,
        ),
    )


def describe(
    loaded: LoadedModel, config: EngineConfig, device: Device, needs: MemoryNeeds, memory: MemoryPlan
) -> Capabilities:
    layout = loaded.pack.layout
    tier = MemoryRow(
        "full-precision experts",
        "disk" if device.kind == "cpu" else "host",
        layout.num_experts * layout.expert_bytes,
        f"{layout.num_experts} experts of {layout.expert_bytes / 1e6:.1f} MB",
    )
    return Capabilities(
        model_path=str(loaded.path),
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=sorted(loaded.eos_token_ids),
        num_experts=layout.num_experts,
        num_slots=memory.num_slots,
        expert_bytes=layout.expert_bytes,
        draft_length=config.draft_length if loaded.draft else 0,
        memory=[*memory_rows(needs, memory, layout.expert_bytes, layout.num_experts), tier],
        device_memory_bytes=memory.budget_bytes,
        decisions=[*loaded.decisions, f"{memory.reason[0].upper()}{memory.reason[1:]}."],
    )
