"""From settings to a model that accelerate offloads, and a core that serves it."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from engine.config import DEMO_MODEL, BenchConfig
from engine.description import compute_dtype, context_length
from engine.device import Device, open_device
from engine.dtypes import dtype_name
from engine.errors import ConfigError, InsufficientMemoryError, UnsupportedModelError
from engine.experts.layout import ExpertLayout, LayerLayout
from engine.host_memory import available_bytes
from engine.loading import eos_token_ids, locate_model
from engine.memory import Budget, device_budget, host_budget
from engine.model.checkpoint import read_config
from engine.model.skeleton import read_skeleton
from engine.model.weights import checkpoint_dtype
from engine.packing import is_pack
from engine.peers.core import PassCore
from engine.peers.loading import load_offloaded, offload_directory
from engine.peers.pacing import pace
from engine.peers.placement import PeerModel, Placement, megabytes, place
from engine.phases import PhaseClock
from engine.planning import explicit_bytes
from engine.protocol import Capabilities, Forecast, Loading, Located, MemoryRow, ModelPlan
from engine.resident import frugal_memory


class Peer(NamedTuple):
    core: PassCore
    capabilities: Capabilities


class Budgets(NamedTuple):
    device: Budget
    host: Budget


@contextmanager
def open_peer(config: BenchConfig, send: Callable[[Loading | Located], None], clock: PhaseClock) -> Iterator[Peer]:
    """Decide where weights go, and load them; files that this takes end with the block. Raises `SpecterError`.

    `send` takes what is told on the way; `clock` gets the stages of the start.
    """
    path = locate_model(config, send)
    send(Located(str(path)))
    device, cache = open_device(config.device), config.cache.expanduser()
    with clock.phase("planning"):
        model = describe_peer_model(config, path, device)
        budgets = _budgets(config, device)
        placement = place(model, budgets.device.num_bytes, budgets.host.num_bytes, is_cpu=device.kind == "cpu")
    # Each pass loads and frees weights of megabytes, which malloc would hoard beyond the budget.
    with offload_directory(cache) as offload_dir, frugal_memory():
        _require_room(model, placement, device, offload_dir)
        with clock.phase("weights"):
            send(Loading("Loading the model with accelerate", 0, 0))
            loaded = load_offloaded(model, placement.device_map, offload_dir)
            if config.link_bandwidth is not None:
                pace(loaded, config.link_bandwidth)
        core = PassCore(
            loaded,
            device.torch_device,
            max_model_len=model.max_model_len,
            vocab_size=model.skeleton.vocab_size,
            eos_token_ids=eos_token_ids(path, model.hf_config),
            pass_bytes=sum(placement.pass_bytes.values()),
        )
        capabilities = Capabilities(
            vocab_size=model.skeleton.vocab_size,
            eos_token_ids=sorted(eos_token_ids(path, model.hf_config)),
            draft_length=0,
            token_compute_seconds=0.0,
            plan=_plan(config, model, placement, budgets, device),
            startup_seconds=dict(clock.seconds),
        )
        yield Peer(core, capabilities)


def describe_peer_model(config: BenchConfig, path: Path, device: Device) -> PeerModel:
    """Raises `ConfigError`, `ModelNotFoundError` or `UnsupportedModelError`."""
    if is_pack(path):
        raise UnsupportedModelError(f"{path} is a packed model, which accelerate cannot read; give the checkpoint.")
    hf_config = read_config(path)
    stored_dtype = checkpoint_dtype(hf_config, path)
    dtype = compute_dtype(config, stored_dtype, device.torch_device)
    if config.kv_dtype not in ("auto", dtype_name(dtype)):
        raise ConfigError(
            f"kv_dtype is {config.kv_dtype!r}, but accelerate keeps the KV cache in the type that is computed in, "
            f"{dtype_name(dtype)}; use auto."
        )
    # Widened on the device only, so that no more bytes are moved than the checkpoint has.
    loaded_dtype = stored_dtype if stored_dtype.itemsize < dtype.itemsize else dtype
    return PeerModel(path, hf_config, read_skeleton(hf_config, loaded_dtype), dtype, context_length(config, hf_config))


def _budgets(config: BenchConfig, device: Device) -> Budgets:
    """By the rules that hold for Specter's engine, which gives the demo model less than there is."""
    if config.device_memory is None and config.model == DEMO_MODEL:
        raise ConfigError("Comparing with the demo model needs a budget: pass --device-memory, such as 900MB.")
    is_cpu = device.kind == "cpu"
    return Budgets(
        device_budget(explicit_bytes(config.device_memory), device.free_bytes(), is_cpu),
        host_budget(explicit_bytes(config.host_memory), available_bytes(), is_cpu),
    )


def _require_room(model: PeerModel, placement: Placement, device: Device, offload_dir: Path) -> None:
    """Raise `InsufficientMemoryError` where the machine has less than the weights would take of it."""
    held = placement.held_bytes
    device_bytes = model.kv_bytes + placement.block_bytes + held["device"]
    for where, needed, free, remedy in (
        ("on the device", device_bytes, device.free_bytes(), "lower --device-memory"),
        ("in host memory", held.get("host", 0), available_bytes(), "lower --host-memory"),
        (f"in {offload_dir.parent}", held["disk"], shutil.disk_usage(offload_dir).free, "choose another --cache"),
    ):
        if needed > free:
            raise InsufficientMemoryError(
                f"accelerate would take {megabytes(needed)} MB {where}, and {free // 10**6} MB are free there; "
                f"free some or {remedy}."
            )


def _plan(config: BenchConfig, model: PeerModel, placement: Placement, budgets: Budgets, device: Device) -> ModelPlan:
    layout = ExpertLayout(tuple(LayerLayout.of(*layer) for layer in model.skeleton.experts))
    layers = list(zip(layout.layers, placement.tiers_of_layers, strict=True))
    pass_bytes = placement.pass_bytes
    return ModelPlan(
        model=config.model,
        drafter="none",
        device=device.describe(),
        memory=_rows(model, placement),
        budget_bytes={"device": budgets.device.num_bytes, "host": budgets.host.num_bytes},
        shortages={},
        remedies=[],
        num_experts=layout.num_experts,
        expert_bytes=layout.expert_bytes,
        cold_token_bytes=sum(pass_bytes.values()),
        num_slots=0,
        num_host_experts=sum(layer.num_experts for layer, tier in layers if tier == "host"),
        max_model_len=model.max_model_len,
        kv_bytes_per_token=sum(layer.num_elements for layer in model.skeleton.kv_layers) * model.dtype.itemsize,
        bandwidths={},
        forecasts=[Forecast(0, 0, float(pass_bytes.get("host", 0)), float(pass_bytes["disk"]))],
        decisions=[
            f"Computing on {device.describe()} in {dtype_name(model.dtype)}, with accelerate's offload.",
            f"Device memory: {budgets.device.num_bytes / 1e6:.0f} MB, {budgets.device.reason}.",
            f"Host memory: {budgets.host.num_bytes / 1e6:.0f} MB, {budgets.host.reason}.",
            f"The experts of {placement.tiers_of_layers.count('device')} of {len(layers)} layers stay on the device; "
            "the others are all loaded for each token.",
        ],
    )


def _rows(model: PeerModel, placement: Placement) -> list[MemoryRow]:
    held, loaded = placement.held_bytes, f"in {dtype_name(model.skeleton.dtype)}, loaded in each pass"
    rows = [
        MemoryRow("resident weights", "device", held["device"], f"in {dtype_name(model.dtype)}"),
        MemoryRow("KV cache", "device", model.kv_bytes, f"at {model.max_model_len} tokens"),
        MemoryRow("loaded weights", "device", placement.block_bytes, "at most, one block at a time"),
    ]
    if held.get("host"):
        rows.append(MemoryRow("offloaded weights", "host", held["host"], loaded))
    return [*rows, MemoryRow("offloaded weights", "disk", held["disk"], loaded)]
