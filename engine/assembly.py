"""Puts the engine's parts together: the place that names concrete classes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from engine.config import BenchConfig
from engine.core import CoreLimits, EngineCore, TargetExperts
from engine.device import Device
from engine.experts.cache import ExpertCache
from engine.experts.layout import ExpertId
from engine.experts.paced import PacedStore
from engine.experts.planner import PrefillPlanner
from engine.experts.policy import ExpertIndex, eviction_policy
from engine.experts.schedule import TransferSchedule
from engine.experts.store import NUM_TRANSFERS, DiskStore, ExpertStore, HostStore, TieredStore, host_experts
from engine.experts.transfer import ExpertTransfers
from engine.loading import LoadedModel
from engine.model.routers import NextRouters
from engine.packing import Pack
from engine.phases import PhaseClock
from engine.protocol import Loading, OnProgress
from engine.speculative.draft import Drafter, NgramDrafter, QuantizedDrafter
from engine.speculative.governor import DraftControl
from engine.speculative.lookahead import RouterLookahead
from engine.speculative.verify import CachedExperts
from engine.trace import Tracer


class Parts(NamedTuple):
    """A loaded model with its slots, whose transfers run."""

    loaded: LoadedModel
    transfers: ExpertTransfers
    routers: NextRouters | None
    """None where the model's routers cannot be told."""
    experts: TargetExperts
    tracer: Tracer


@contextmanager
def open_parts(
    loaded: LoadedModel,
    config: BenchConfig,
    store: ExpertStore,
    num_slots: int,
    device: Device,
    piece_bytes: int | None = None,
) -> Iterator[Parts]:
    """Slots, and the threads that fill them from the store, which end with the block.

    Experts are moved in pieces of `piece_bytes`, or whole where that is None.
    """
    tracer = Tracer(config.trace)
    layout = loaded.pack.layout
    index = ExpertIndex([layer.num_experts for layer in layout.layers])
    cache = ExpertCache(device.empty_bytes(num_slots, layout.expert_bytes), index)

    def size_of_pieces(expert: ExpertId) -> int:
        return piece_bytes if piece_bytes is not None and store.is_divisible(expert) else layout.expert_bytes

    policy = eviction_policy(config.cache_policy, index, num_slots)
    schedule = TransferSchedule(cache, policy, index, size_of_pieces)
    transfers = ExpertTransfers(schedule, store, device, tracer)
    routers = loaded.model.routers(loaded.description.skeleton.top_k)
    lookahead = RouterLookahead(routers) if routers is not None and config.prefetch else None
    experts = TargetExperts(
        planned=CachedExperts(transfers, loaded.codec, tracer),
        unplanned=CachedExperts(transfers, loaded.codec, tracer, lookahead),
    )
    transfers.start(NUM_TRANSFERS)
    try:
        yield Parts(loaded, transfers, routers, experts, tracer)
    finally:
        transfers.close()


@contextmanager
def open_store(
    pack: Pack, num_host_experts: int, device: Device, on_progress: OnProgress, link_bandwidth: int | None = None
) -> Iterator[PacedStore]:
    """As many experts as planned in host memory, the others on disk; closed with the block."""
    store = PacedStore(_open_tiers(pack, num_host_experts, device, on_progress), link_bandwidth)
    try:
        yield store
    finally:
        store.close()


def _open_tiers(pack: Pack, num_host_experts: int, device: Device, on_progress: OnProgress) -> ExpertStore:
    with ExitStack() as stack:
        records = stack.enter_context(pack.open_records())
        store: ExpertStore
        if not num_host_experts:
            store = DiskStore(records, device)
        else:
            stage = "Loading experts into host memory"
            host = HostStore.load(
                device,
                records,
                host_experts(pack.layout, num_host_experts),
                lambda done: on_progress(Loading(stage, done, num_host_experts)),
            )
            if num_host_experts == pack.layout.num_experts:
                return host
            stack.callback(host.close)
            store = TieredStore(host, DiskStore(records, device))
        stack.pop_all()  # the store closes them
        return store


def assemble_core(parts: Parts, config: BenchConfig, control: DraftControl) -> EngineCore:
    loaded, transfers = parts.loaded, parts.transfers
    clock = PhaseClock()
    skeleton, choices = loaded.description.skeleton, loaded.description.choices
    drafter: Drafter | None = None
    if loaded.draft is not None:
        drafter = QuantizedDrafter(loaded.model, loaded.draft, transfers, clock, parts.tracer)
    elif choices.drafter == "ngram":
        drafter = NgramDrafter(skeleton.vocab_size, clock)
    return EngineCore(
        model=loaded.model,
        experts=parts.experts,
        drafter=drafter,
        control=control,
        transfers=transfers,
        prefill_planner=PrefillPlanner(loaded.pack.layout, skeleton.top_k) if config.prefetch else None,
        clock=clock,
        tracer=parts.tracer,
        limits=CoreLimits(
            max_model_len=choices.max_model_len,
            vocab_size=skeleton.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            prefill_chunk_tokens=choices.prefill_chunk_tokens,
        ),
    )
