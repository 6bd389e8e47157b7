"""How a budget of device memory is divided: pure arithmetic, made before anything large is allocated."""

from typing import NamedTuple

from engine.errors import InsufficientMemoryError
from engine.protocol import MemoryRow

CUDA_MARGIN = 0.1
"""Share of free CUDA memory that is left to the allocator, cuBLAS and others by default."""

DEFAULT_CPU_SLOT_SHARE = 0.25


class MemoryNeeds(NamedTuple):
    """Bytes that are wanted on the device, whatever the number of slots."""

    dense: int
    draft: int
    kv_cache: int
    workspace: int

    @property
    def total(self) -> int:
        return sum(self)


class MemoryPlan(NamedTuple):
    budget_bytes: int
    num_slots: int
    reason: str
    """Why the budget is what it is, one sentence."""


def plan_memory(
    needs: MemoryNeeds,
    *,
    expert_bytes: int,
    num_experts: int,
    budget_bytes: int | None,
    free_bytes: int,
    is_cuda: bool,
) -> MemoryPlan:
    """Give what the needs leave of the budget to slots. Raises `InsufficientMemoryError` where not one slot remains.

    Without a budget: on CUDA what is free less a margin, on a CPU what leaves room for a quarter of the experts.
    """
    if budget_bytes is not None:
        reason = "device memory as set"
    elif is_cuda:
        budget_bytes = int(free_bytes * (1 - CUDA_MARGIN))
        reason = f"device memory is what is free, less {CUDA_MARGIN:.0%}"
    else:
        num_wanted = max(1, int(num_experts * DEFAULT_CPU_SLOT_SHARE))
        budget_bytes = needs.total + num_wanted * expert_bytes
        reason = f"device memory is set to hold {DEFAULT_CPU_SLOT_SHARE:.0%} of the experts; --device-memory changes it"
    num_slots = min(num_experts, (budget_bytes - needs.total) // expert_bytes)
    if num_slots < 1:
        raise InsufficientMemoryError(_too_small(needs, expert_bytes, budget_bytes))
    if needs.total + num_slots * expert_bytes > free_bytes:
        raise InsufficientMemoryError(_not_free(needs, expert_bytes, budget_bytes, free_bytes))
    return MemoryPlan(budget_bytes, num_slots, reason)


def memory_rows(needs: MemoryNeeds, plan: MemoryPlan, expert_bytes: int, num_experts: int) -> list[MemoryRow]:
    """The device's part of the memory table."""
    share = plan.num_slots / num_experts
    return [
        MemoryRow("dense weights", "device", needs.dense, "embeddings, attention, routers, norms, LM head"),
        MemoryRow("draft experts", "device", needs.draft, "quantized copy of all experts"),
        MemoryRow("KV cache", "device", needs.kv_cache, "at the maximum context length"),
        MemoryRow("workspace", "device", needs.workspace, "activations (estimate) and weight conversion"),
        MemoryRow(
            "expert slots", "device", plan.num_slots * expert_bytes, f"{plan.num_slots}, for {share:.0%} of the experts"
        ),
    ]


def _too_small(needs: MemoryNeeds, expert_bytes: int, budget_bytes: int) -> str:
    parts = ", ".join(f"{name.replace('_', ' ')} {_mb(size)}" for name, size in needs._asdict().items())
    return (
        f"device_memory is {_mb(budget_bytes)}, but this model needs at least {_mb(needs.total + expert_bytes)} "
        f"({parts}, one expert slot {_mb(expert_bytes)}); raise --device-memory, lower --max-model-len, "
        "or give up the draft with --no-draft."
    )


def _not_free(needs: MemoryNeeds, expert_bytes: int, budget_bytes: int, free_bytes: int) -> str:
    least_bytes = needs.total + expert_bytes
    free = f"{free_bytes // 10**6} MB"
    if least_bytes > free_bytes:
        return (
            f"This model needs at least {_mb(least_bytes)} of device memory, but only {free} is free; free some, "
            "lower --max-model-len, or give up the draft with --no-draft."
        )
    return f"device_memory is {_mb(budget_bytes)}, but only {free} is free; set --device-memory to no more than that."


def _mb(num_bytes: int) -> str:
    return f"{-(-num_bytes // 10**6)} MB"
