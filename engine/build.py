"""Assembles the engine: the place that names concrete classes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.config import EngineConfig, PackConfig
from engine.core import CoreLimits, EngineCore
from engine.description import describe_model
from engine.device import Device, open_device
from engine.errors import ConfigError
from engine.experts.bandwidth import measure_copy, measure_disk
from engine.experts.cache import ExpertCache
from engine.experts.planner import PrefillPlanner
from engine.experts.policy import PerLayerLru
from engine.experts.store import NUM_TRANSFERS, DiskStore, ExpertStore, HostStore, TieredStore, host_experts
from engine.experts.transfer import ExpertTransfers
from engine.loading import LoadedModel, load_model, locate_configuration, locate_model, pack_model
from engine.model.tensor_files import weight_files
from engine.packing import Pack, find_records
from engine.phases import PhaseClock
from engine.planning import Machine, plan_model, require_fit
from engine.protocol import Capabilities, Loading, Located, ModelPlan, OnProgress, Tier
from engine.speculative.draft import Drafter
from engine.speculative.verify import CachedExperts


class Engine(NamedTuple):
    core: EngineCore
    capabilities: Capabilities


@contextmanager
def open_engine(config: EngineConfig, send: Callable[[Loading | Located], None], clock: PhaseClock) -> Iterator[Engine]:
    """Plan, load the model and start the transfer threads; these end with the block. Raises `SpecterError`.

    `send` takes what is told on the way; `clock` gets the stages of the start.
    """
    path = locate_model(config, send)
    send(Located(str(path)))
    device = open_device(config.device)
    with clock.phase("planning"):
        model = describe_model(config, path, device.torch_device)
        plan = plan_model(config, model, Machine.of(device))
        require_fit(plan)
    loaded = load_model(config, model, device, clock, send)
    with ExitStack() as stack:
        with clock.phase("experts"):
            store = open_store(loaded.pack, plan.num_host_experts, device, send)
            stack.callback(store.close)
            transfers = open_transfers(loaded, plan.num_slots, store, device)
            stack.callback(transfers.close)
        with clock.phase("bandwidth"):
            bandwidths = measure_tiers(plan, device, loaded.pack.records_path)
        core = assemble_core(loaded, transfers, config)
        capabilities = Capabilities(
            vocab_size=model.skeleton.vocab_size,
            eos_token_ids=sorted(loaded.eos_token_ids),
            draft_length=model.choices.draft_length,
            plan=msgspec.structs.replace(plan, bandwidths=bandwidths),
            startup_seconds=dict(clock.seconds),
        )
        yield Engine(core, capabilities)


def pack(config: PackConfig, on_progress: OnProgress) -> Path:
    """Pack a model, with its draft; the pack's directory. Raises `SpecterError`."""
    path = locate_model(config, on_progress)
    model = describe_model(config, path, open_device(config.device).torch_device)
    directory = config.out.expanduser() if config.out else None
    packed, _ = pack_model(model, config.cache.expanduser(), directory, on_progress)
    return packed.directory


def plan(config: EngineConfig, on_progress: OnProgress) -> ModelPlan:
    """Where everything would go, and how fast the tiers are here. Raises `SpecterError`."""
    path = locate_configuration(config, on_progress)
    try:
        device: Device | None = open_device(config.device)
    except ConfigError:
        device = None
    machine = Machine.of(device) if device else Machine.with_absent_cuda()
    made = plan_model(config, describe_model(config, path, machine.device), machine)
    weights = [file for file in weight_files(path) if file.exists()]
    readable = find_records(path, config.cache.expanduser()) or max(
        weights, key=lambda file: file.stat().st_size, default=None
    )
    bandwidths = measure_tiers(made, device, readable)
    return msgspec.structs.replace(made, bandwidths=bandwidths)


def measure_tiers(plan: ModelPlan, device: Device | None, on_disk: Path | None) -> dict[Tier, float]:
    """Bytes per second out of the tiers that experts are read from, as far as there is something to measure."""
    bandwidths: dict[Tier, float] = {}
    if plan.num_host_experts and device:
        bandwidths["host"] = measure_copy(device)
    if plan.num_disk_experts and on_disk and (bandwidth := measure_disk(on_disk)):
        bandwidths["disk"] = bandwidth
    return bandwidths


def open_store(pack: Pack, num_host_experts: int, device: Device, on_progress: OnProgress) -> ExpertStore:
    """As many experts as planned in host memory, the others on disk."""
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


def open_transfers(loaded: LoadedModel, num_slots: int, store: ExpertStore, device: Device) -> ExpertTransfers:
    """Slots, and the threads that fill them; the caller closes it before the store."""
    layout = loaded.pack.layout
    cache = ExpertCache(device.empty_bytes(num_slots, layout.expert_bytes), PerLayerLru(num_slots, len(layout.layers)))
    transfers = ExpertTransfers(cache, store, device)
    transfers.start(NUM_TRANSFERS)
    return transfers


def assemble_core(loaded: LoadedModel, transfers: ExpertTransfers, config: EngineConfig) -> EngineCore:
    clock = PhaseClock()
    skeleton, choices = loaded.description.skeleton, loaded.description.choices
    return EngineCore(
        model=loaded.model,
        experts=CachedExperts(transfers, loaded.codec),
        drafter=Drafter(loaded.model, loaded.draft, transfers, clock) if loaded.draft else None,
        transfers=transfers,
        prefill_planner=PrefillPlanner(loaded.pack.layout, skeleton.top_k),
        clock=clock,
        limits=CoreLimits(
            max_model_len=choices.max_model_len,
            vocab_size=skeleton.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            draft_length=config.draft_length,
        ),
    )
