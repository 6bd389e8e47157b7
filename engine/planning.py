"""Where every part of a model goes. Loads no weights.

`specter plan` prints the plan; `serve` makes the same one first, refuses what does not fit, and loads by it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch

from engine.config import DEMO_MODEL, BenchConfig, EngineConfig
from engine.description import ModelDescription
from engine.device import Device
from engine.dtypes import dtype_name
from engine.errors import ConfigError, InsufficientMemoryError
from engine.experts.store import NUM_TRANSFERS
from engine.forecast import forecast
from engine.host_memory import available_bytes
from engine.memory import Budget, SlotPlan, device_budget, host_budget, plan_slots, showcase_budget
from engine.model.skeleton import Skeleton
from engine.protocol import Forecast, MemoryRow, ModelPlan, Tier
from engine.remedies import device_remedies
from engine.sizing import Choices, ModelSizes

MAX_CHUNK_SHARE = 0.05
"""How much of the slots' memory longer prefill steps may take."""
MIN_CHUNK_TOKENS = 64
MAX_CHUNK_TOKENS = 2048
FORECAST_DRAFT_LENGTHS = (1, 2, 4, 8)
"""What a draft of automatic length is forecast for."""


class Machine(NamedTuple):
    """What there is to plan for."""

    device: torch.device
    description: str
    free_device_bytes: int | None
    """None where the device is not in this machine."""
    free_host_bytes: int

    @classmethod
    def of(cls, device: Device) -> "Machine":
        return cls(device.torch_device, device.describe(), device.free_bytes(), available_bytes())

    @classmethod
    def with_absent_cuda(cls) -> "Machine":
        """A GPU that this machine does not have."""
        return cls(torch.device("cuda"), "a CUDA device (there is none here)", None, available_bytes())

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def is_absent(self) -> bool:
        """Whether this is another machine than the one that plans, whose sizes are as set."""
        return self.free_device_bytes is None

    def free_beside(self, host_bytes: int) -> int | None:
        """What is free on the device where the host tier takes `host_bytes`, which on a CPU are the same memory."""
        if self.free_device_bytes is None:
            return None
        return max(0, self.free_device_bytes - host_bytes) if self.is_cpu else self.free_device_bytes


class Alternative(NamedTuple):
    plan: ModelPlan
    choices: Choices


def alternatives(config: BenchConfig, model: ModelDescription, machine: Machine) -> list[Alternative]:
    """Ways to divide the machine's memory: one as set, or one for each drafter that fits where that is automatic.

    The first quantized draft is the one that a profile is made with. A model that does not fit is no error here: its
    only plan says so. Raises `ConfigError` where a size is not known.
    """
    choices = [model.choices]
    if config.draft == "auto" and model.choices.draft:
        if config.draft_weights == "auto":
            choices.append(model.choices.with_finer_draft())
        choices.append(model.choices.without_quantized_draft())  # which needs the least memory
    found = [_plan(config, model, alternative, machine) for alternative in choices]
    return [alternative for alternative in found if alternative.plan.fits] or found[-1:]


def choose(found: Sequence[Alternative], predict: Callable[[Alternative], float] | None = None) -> Alternative:
    """The one with the least seconds per output token by `predict`; without it, the one that moves the least bytes."""
    if len(found) == 1:
        return found[0]
    if predict is None:
        return min(reversed(found), key=lambda alternative: _moved_bytes(alternative.plan.forecasts[0]))
    seconds = [predict(alternative) for alternative in found]
    best, _ = min(zip(found, seconds, strict=True), key=lambda pair: pair[1])
    predictions = ", ".join(
        f"{1e3 * tpot:.0f} ms with {_drafter_name(choices)} and {plan.num_slots} slots"
        for (plan, choices), tpot in zip(found, seconds, strict=True)
    )
    decisions = [*best.plan.decisions, f"Predicted per output token: {predictions}."]
    return best._replace(plan=msgspec.structs.replace(best.plan, decisions=decisions))


def _drafter_name(choices: Choices) -> str:
    return f"a {choices.draft} draft" if choices.draft else "n-grams"


def _moved_bytes(forecast: Forecast) -> float:
    return forecast.host_bytes_per_token + forecast.disk_bytes_per_token


def _plan(config: BenchConfig, model: ModelDescription, choices: Choices, machine: Machine) -> Alternative:
    skeleton, sizes = model.skeleton, model.sizes
    host = host_budget(explicit_bytes(config.host_memory), machine.free_host_bytes, machine.is_cpu)
    experts_bytes, staging_bytes = _host_bytes(host.num_bytes, machine, sizes)
    num_host, host_bytes = experts_bytes // sizes.expert_bytes, experts_bytes + staging_bytes
    # Alternatives compete within one budget, that of the first.
    budget = _device_budget(config, machine, sizes, model.choices, host_bytes)
    if config.prefill_chunk_tokens == "auto":
        choices = _with_chunks(sizes, choices, budget.num_bytes)
    needs = sizes.needs(choices)
    slots = plan_slots(needs, sizes.expert_bytes, sizes.num_experts, budget.num_bytes, machine.free_device_bytes)
    slots = slots._replace(num_slots=min(slots.num_slots, config.max_slots or slots.num_slots))
    device_bytes = needs.total + slots.num_slots * sizes.expert_bytes
    host_shortage = host_bytes + (device_bytes if machine.is_cpu else 0) - machine.free_host_bytes
    shortages: dict[Tier, int] = {}
    remedies: list[str] = []
    if slots.shortage_bytes:
        shortages["device"] = slots.shortage_bytes
        remedies = _device_remedies(config, machine, sizes, choices, host_bytes)
    if host_bytes and host_shortage > 0 and not machine.is_absent:
        shortages["host"] = host_shortage
        megabytes = (host_bytes - host_shortage) // 10**6
        if not slots.shortage_bytes and sum(_host_bytes(megabytes * 10**6, machine, sizes)) <= machine.free_host_bytes:
            remedies = [f"--host-memory {megabytes}MB"]
    plan = ModelPlan(
        model=config.model,
        drafter=choices.drafter,
        device=machine.description,
        memory=_rows(sizes, choices, slots, num_host, staging_bytes),
        budget_bytes={"device": budget.num_bytes, "host": host.num_bytes},
        shortages=shortages,
        remedies=remedies,
        num_experts=sizes.num_experts,
        expert_bytes=sizes.expert_bytes,
        cold_token_bytes=sizes.cold_token_bytes(skeleton.top_k),
        num_slots=slots.num_slots,
        num_host_experts=num_host,
        max_model_len=choices.max_model_len,
        kv_bytes_per_token=sum(layer.num_elements for layer in skeleton.kv_layers) * choices.kv_dtype.itemsize,
        bandwidths={},
        forecasts=_forecasts(config, skeleton, sizes, choices, budget, slots, num_host),
        decisions=_decisions(config, machine, sizes, choices, budget, host),
    )
    return Alternative(plan, choices)


def _with_chunks(sizes: ModelSizes, choices: Choices, budget_bytes: int) -> Choices:
    """The longest prefill steps that take little of the slots' memory, or short ones where there is none."""

    def room(chunk_tokens: int) -> int:
        return budget_bytes - sizes.needs(choices._replace(prefill_chunk_tokens=chunk_tokens)).total

    usual = choices.prefill_chunk_tokens
    slots_bytes = room(usual)
    chunk_tokens = usual
    while chunk_tokens * 2 <= min(MAX_CHUNK_TOKENS, choices.max_model_len):
        if slots_bytes - room(chunk_tokens * 2) > MAX_CHUNK_SHARE * slots_bytes:
            break
        chunk_tokens *= 2
    while chunk_tokens > MIN_CHUNK_TOKENS and room(chunk_tokens) < sizes.expert_bytes:
        chunk_tokens //= 2
    return choices._replace(prefill_chunk_tokens=chunk_tokens)


def _device_budget(
    config: EngineConfig, machine: Machine, sizes: ModelSizes, choices: Choices, host_bytes: int
) -> Budget:
    set_bytes, free_bytes = explicit_bytes(config.device_memory), machine.free_beside(host_bytes)
    if config.device_memory is None and config.model == DEMO_MODEL:
        showcase = showcase_budget(sizes.needs(choices), sizes.expert_bytes, sizes.num_experts)
        return showcase if free_bytes is None else min(showcase, device_budget(None, free_bytes, machine.is_cpu))
    if set_bytes is None and free_bytes is None:
        raise ConfigError(f"Planning for {machine.description} needs its size: pass --device-memory, such as 24GB.")
    return device_budget(set_bytes, free_bytes or 0, machine.is_cpu)


def _device_remedies(
    config: EngineConfig, machine: Machine, sizes: ModelSizes, choices: Choices, host_bytes: int
) -> list[str]:
    """What makes both tiers fit; where that takes less host memory too, each remedy says so."""

    def remedies(host_bytes: int) -> list[str]:
        budget = _device_budget(config, machine, sizes, choices, host_bytes)
        return device_remedies(sizes, choices, budget.num_bytes, machine.free_beside(host_bytes))

    host_fits = machine.is_cpu or machine.is_absent or host_bytes <= machine.free_host_bytes
    found = remedies(host_bytes) if host_fits else []
    if found:
        return found
    megabytes = 0 if machine.is_cpu else machine.free_host_bytes // 10**6
    if sum(_host_bytes(megabytes * 10**6, machine, sizes)) > machine.free_host_bytes:
        return []
    less_host = f"--host-memory {megabytes}MB"
    budget = _device_budget(config, machine, sizes, choices, megabytes * 10**6)
    needs, free_bytes = sizes.needs(choices), machine.free_device_bytes
    slots = plan_slots(needs, sizes.expert_bytes, sizes.num_experts, budget.num_bytes, free_bytes)
    if not slots.shortage_bytes:
        return [less_host]
    return [f"{remedy} {less_host}" for remedy in remedies(megabytes * 10**6)]


def explicit_bytes(setting: int | str | None) -> int | None:
    """Without the type of the settings, which msgspec does not encode."""
    return None if setting is None or isinstance(setting, str) else int(setting)


def _host_bytes(budget_bytes: int, machine: Machine, sizes: ModelSizes) -> tuple[int, int]:
    """Bytes of the experts in host memory, and of the buffers through which a GPU's other experts come from disk."""
    num_host = min(sizes.num_experts, budget_bytes // sizes.expert_bytes)
    if machine.is_cpu or num_host == sizes.num_experts:
        return num_host * sizes.expert_bytes, 0
    return max(0, num_host - NUM_TRANSFERS) * sizes.expert_bytes, NUM_TRANSFERS * sizes.expert_bytes


def _rows(sizes: ModelSizes, choices: Choices, slots: SlotPlan, num_host: int, staging_bytes: int) -> list[MemoryRow]:
    needs = sizes.needs(choices)
    num_experts, expert_bytes = sizes.num_experts, sizes.expert_bytes
    share = slots.num_slots / num_experts
    draft = f"all experts in {choices.draft}" if choices.draft else "none"
    rows = [
        MemoryRow("dense weights", "device", needs.dense, f"all but the experts, in {dtype_name(choices.dtype)}"),
        MemoryRow("draft experts", "device", needs.draft, draft),
        MemoryRow(
            "KV cache",
            "device",
            needs.kv_cache,
            f"at {choices.max_model_len} tokens, in {dtype_name(choices.kv_dtype)}",
        ),
        MemoryRow("workspace", "device", needs.workspace, "activations (estimate), weight conversion"),
        MemoryRow(
            "expert slots",
            "device",
            slots.num_slots * expert_bytes,
            f"{slots.num_slots}, for {share:.0%} of the experts",
        ),
    ]
    if num_host:
        note = f"{num_host} of {num_experts}, {expert_bytes / 1e6:.1f} MB each"
        rows.append(MemoryRow("full-precision experts", "host", num_host * expert_bytes, note))
    if staging_bytes:
        rows.append(MemoryRow("staging buffers", "host", staging_bytes, "what comes from disk passes through"))
    from_disk = num_experts - num_host
    note = f"{from_disk} of {num_experts} experts are read from here" if from_disk else "read at the start only"
    rows.append(MemoryRow("packed model", "disk", sizes.pack_bytes(choices.draft), note))
    return rows


def _forecasts(
    config: EngineConfig,
    skeleton: Skeleton,
    sizes: ModelSizes,
    choices: Choices,
    budget: Budget,
    slots: SlotPlan,
    num_host: int,
) -> list[Forecast]:
    """Of the choices, and of plain decoding."""

    def forecast_of(draft_length: int, num_slots: int) -> Forecast:
        return forecast(
            [layer.num_experts for layer in sizes.layout.layers],
            skeleton.top_k,
            sizes.expert_bytes,
            draft_length=draft_length,
            num_slots=num_slots,
            num_host_experts=num_host,
        )

    plain = choices.without_quantized_draft()
    plain_slots = plan_slots(sizes.needs(plain), sizes.expert_bytes, sizes.num_experts, budget.num_bytes, None)
    forecasts = [forecast_of(0, plain_slots.num_slots)]
    if choices.draft:
        lengths = FORECAST_DRAFT_LENGTHS if config.draft_length == "auto" else [config.draft_length]
        forecasts.insert(0, min((forecast_of(length, slots.num_slots) for length in lengths), key=_moved_bytes))
    return forecasts


def _decisions(
    config: EngineConfig, machine: Machine, sizes: ModelSizes, choices: Choices, budget: Budget, host: Budget
) -> list[str]:
    name = dtype_name(choices.dtype)
    if config.dtype != "auto":
        reason = ", as set"
    elif machine.is_cpu:
        reason = ", which is faster and more exact on a CPU than 16 bits"
    else:
        reason = ", the checkpoint's type"
    decisions = [
        f"Computing on {machine.description} in {name}{reason}.",
        f"Device memory: {budget.num_bytes / 1e6:.0f} MB, {budget.reason}.",
        f"Host memory for experts: {host.num_bytes / 1e6:.0f} MB, {host.reason}.",
    ]
    if config.prefill_chunk_tokens == "auto":
        decisions.append(f"Prompts are computed in steps of up to {choices.prefill_chunk_tokens} tokens.")
    if choices.kv_dtype is not choices.dtype:
        decisions.append(f"The KV cache is kept in {dtype_name(choices.kv_dtype)}, as set, and converted on use.")
    if choices.drafter == "none":
        return [*decisions, "No draft: every token is decoded by itself."]
    length = str(choices.draft_length) if config.draft_length != "auto" else f"up to {choices.draft_length}"
    if choices.draft is None:
        return [*decisions, f"Drafting {length} tokens per cycle from what followed the last ones before."]
    draft = (
        f"Drafting {length} tokens per cycle with {choices.draft} experts: "
        f"{sizes.quantized_share():.1%} of all parameters quantized"
    )
    if sizes.has_slow_draft(choices.draft):
        draft += "; no fast kernel here, so weights are dequantized on each use"
    return [*decisions, f"{draft}."]


def require_fit(plan: ModelPlan) -> None:
    """Raise `InsufficientMemoryError` where the model does not fit, with the way out."""
    for tier, shortage in plan.shortages.items():
        parts = ", ".join(f"{row.part} {_mb(row.num_bytes)}" for row in plan.memory if row.tier == tier)
        remedy = f"pass {' or '.join(plan.remedies)}" if plan.remedies else "no setting makes it fit here"
        raise InsufficientMemoryError(
            f"{plan.model} needs {_mb(shortage)} more {tier} memory than there is for it, "
            f"{_mb(plan.tier_bytes(tier) - shortage)} ({parts}); {remedy}."
        )


def _mb(num_bytes: int) -> str:
    return f"{-(-num_bytes // 10**6)} MB"
