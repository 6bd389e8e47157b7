"""From settings to an engine that serves, to a pack, to a plan."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.assembly import assemble_core, open_parts, open_store
from engine.choice import draft_control, draft_expectation, link_bandwidth, predicted_seconds, profile_with
from engine.config import BenchConfig, EngineConfig, PackConfig
from engine.core import EngineCore
from engine.description import ModelDescription, describe_model
from engine.device import Device, open_device
from engine.errors import ConfigError
from engine.experts.bandwidth import measure_copy, measure_disk, piece_bytes
from engine.kernels.quantization import QuantizationSpec
from engine.loading import load_model, locate_configuration, locate_model, pack_model
from engine.model.tensor_files import weight_files
from engine.packing import Pack, find_records
from engine.packing.profiles import read_profile, write_profile
from engine.phases import PhaseClock
from engine.planning import Alternative, Machine, alternatives, choose, require_fit
from engine.profile import NUM_TOKENS, PassTimes, Profile, record_profile
from engine.protocol import Capabilities, Loading, Located, ModelPlan, OnProgress, Tier
from engine.sizing import Choices
from engine.warm_up import measure_passes


class Engine(NamedTuple):
    core: EngineCore
    capabilities: Capabilities


@contextmanager
def open_engine(config: EngineConfig, send: Callable[[Loading | Located], None], clock: PhaseClock) -> Iterator[Engine]:
    """Plan, load the model and start the transfer threads; these end with the block. Raises `SpecterError`.

    `send` takes what is told on the way; `clock` gets the stages of the start.
    """
    bench = bench_config(config)
    path = locate_model(config, send)
    send(Located(str(path)))
    device = open_device(config.device)
    prepared = _prepare(bench, path, device, clock, send)
    model, plan, profile = prepared.model, prepared.plan, prepared.profile
    bandwidth = link_bandwidth(plan, plan.bandwidths)
    loaded = load_model(config, model, device, clock, send)
    with ExitStack() as stack:
        with clock.phase("experts"):
            store = stack.enter_context(
                open_store(loaded.pack, plan.num_host_experts, device, send, bench.link_bandwidth)
            )
            parts = stack.enter_context(
                open_parts(loaded, bench, store, plan.num_slots, device, piece_bytes(bandwidth))
            )
        with clock.phase("warm-up"):
            times = measure_passes(
                loaded.model, parts.experts.planned, parts.transfers, loaded.draft, model.skeleton.vocab_size
            )
        if profile is not None:
            _improve(profile, times, prepared.pack, prepared.subject)
        store.is_on = True
        choices = model.choices
        tokens = profile_with(profile, prepared.profiled_draft, choices.draft, model.sizes).tokens if profile else ()
        expected = draft_expectation(plan, choices, model.sizes, model.skeleton.top_k, times, tokens, bandwidth)
        core = assemble_core(parts, bench, draft_control(bench, choices, expected))
        capabilities = Capabilities(
            vocab_size=model.skeleton.vocab_size,
            eos_token_ids=sorted(loaded.eos_token_ids),
            draft_length=choices.draft_length,
            token_compute_seconds=times.verify_seconds[0],
            plan=plan,
            startup_seconds=dict(clock.seconds),
        )
        yield Engine(core, capabilities)


class _Prepared(NamedTuple):
    """What is decided before a model is loaded."""

    model: ModelDescription
    """With the choices that the plan is for."""
    plan: ModelPlan
    pack: Pack
    profile: Profile | None
    """None where nothing has to be chosen, and there is none from before."""
    subject: str
    """Of the profile."""
    profiled_draft: QuantizationSpec | None
    """That the profile was made with."""


def _prepare(config: BenchConfig, path: Path, device: Device, clock: PhaseClock, send: OnProgress) -> _Prepared:
    """Plan, pack, and choose what drafts; for that, profile the model if it has not been. Raises `SpecterError`."""
    with clock.phase("planning"):
        model = describe_model(config, path, device.torch_device)
        machine = Machine.of(device)
        found = alternatives(config, model, machine)
        require_fit(found[0].plan)
    with clock.phase("packing"):
        pack, _ = pack_model(model._replace(choices=found[0].choices), config.cache.expanduser(), None, send)
    with clock.phase("bandwidth"):
        bandwidths = measure_tiers(found[0].plan, device, pack.records_path, config.link_bandwidth)
    with clock.phase("choosing"):
        subject = profile_subject(machine, model.choices)
        profile = read_profile(pack.directory, subject)
        if len(found) > 1 and profile is None:
            profile = _make_profile(config, model, found[0], device, clock, send)
            write_profile(pack.directory, subject, profile)
        plan, choices = choose(found, _prediction(config, model, profile, bandwidths))
    plan = msgspec.structs.replace(plan, bandwidths=bandwidths)
    return _Prepared(model._replace(choices=choices), plan, pack, profile, subject, model.choices.draft)


def pack(config: PackConfig, on_progress: OnProgress) -> Path:
    """Pack a model, with its draft; the pack's directory. Raises `SpecterError`."""
    path = locate_model(config, on_progress)
    model = describe_model(config, path, open_device(config.device).torch_device)
    directory = config.out.expanduser() if config.out else None
    packed, _ = pack_model(model, config.cache.expanduser(), directory, on_progress)
    return packed.directory


def plan(config: EngineConfig, on_progress: OnProgress) -> ModelPlan:
    """Where everything would go, and how fast the tiers are here. Raises `SpecterError`.

    An automatic drafter is chosen as `open_engine` does where the model has been served here before, so that there is a
    profile of it; else by the bytes that it would move.
    """
    bench = bench_config(config)
    path = locate_configuration(config, on_progress)
    try:
        device: Device | None = open_device(config.device)
    except ConfigError:
        device = None
    machine = Machine.of(device) if device else Machine.with_absent_cuda()
    model = describe_model(config, path, machine.device)
    found = alternatives(bench, model, machine)
    records = find_records(path, config.cache.expanduser())
    weights = [file for file in weight_files(path) if file.exists()]
    readable = records or max(weights, key=lambda file: file.stat().st_size, default=None)
    bandwidths = measure_tiers(found[0].plan, device, readable)
    profile = read_profile(records.parent, profile_subject(machine, model.choices)) if records else None
    best = choose(found, _prediction(bench, model, profile, bandwidths))
    return msgspec.structs.replace(best.plan, bandwidths=bandwidths)


def bench_config(config: EngineConfig) -> BenchConfig:
    """The settings with those of comparisons, which are as usual where the configuration does not have them."""
    return config if isinstance(config, BenchConfig) else BenchConfig.model_validate(dict(config))


def measure_tiers(
    plan: ModelPlan, device: Device | None, on_disk: Path | None, limit: int | None = None
) -> dict[Tier, float]:
    """Bytes per second out of the tiers that experts are read from, as far as there is something to measure.

    `limit` is the most that is let through.
    """
    bandwidths: dict[Tier, float] = {}
    if plan.num_host_experts and device:
        bandwidths["host"] = measure_copy(device)
    if plan.num_disk_experts and on_disk and (bandwidth := measure_disk(on_disk)):
        bandwidths["disk"] = bandwidth
    return {tier: min(rate, limit or rate) for tier, rate in bandwidths.items()}


def _prediction(
    config: BenchConfig, model: ModelDescription, profile: Profile | None, bandwidths: dict[Tier, float]
) -> Callable[[Alternative], float] | None:
    if profile is None:
        return None
    return predicted_seconds(
        config, model.sizes, model.skeleton.top_k, profile, bandwidths, profiled_draft=model.choices.draft
    )


def profile_subject(machine: Machine, choices: Choices) -> str:
    """What a profile is valid for."""
    return f"{machine.description}, {choices.dtype}, {choices.draft}"


def _make_profile(
    config: BenchConfig,
    model: ModelDescription,
    drafting: Alternative,
    device: Device,
    clock: PhaseClock,
    send: OnProgress,
) -> Profile:
    """Load the model with its quantized draft, and let it write a text."""
    loaded = load_model(config, model._replace(choices=drafting.choices), device, clock, send)
    with (
        open_store(loaded.pack, drafting.plan.num_host_experts, device, send) as store,
        open_parts(loaded, config, store, drafting.plan.num_slots, device) as parts,
    ):
        experts, vocab_size = parts.experts.planned, model.skeleton.vocab_size
        times = measure_passes(loaded.model, experts, parts.transfers, loaded.draft, vocab_size)
        tokens = record_profile(
            loaded.model,
            experts,
            loaded.draft,
            parts.routers,
            first_token_id=_first_token_id(model),
            max_model_len=drafting.choices.max_model_len,
            on_token=lambda count: send(Loading("Profiling the model", count, NUM_TOKENS)),
        )
    return Profile(tokens, times)


def _improve(profile: Profile, times: PassTimes, pack: Pack, subject: str) -> None:
    """Keep what was measured of the passes if they were faster than when the profile was made."""
    least = profile.times.least(times)
    if least != profile.times:
        write_profile(pack.directory, subject, msgspec.structs.replace(profile, times=least))


def _first_token_id(model: ModelDescription) -> int:
    """What a text begins with."""
    token_id = model.hf_config.get_text_config().bos_token_id
    return int(token_id) if isinstance(token_id, int) else 0
