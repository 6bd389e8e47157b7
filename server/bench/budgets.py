"""How much device memory every mode of a cell gets."""

from collections.abc import Sequence

from pydantic import ByteSize, TypeAdapter, ValidationError

from engine.errors import ConfigError
from engine.protocol import ModelPlan
from server.formats import megabytes

SHARES = (0.35, 0.5, 0.75)
"""Of all experts' bytes, that the slots of a mode without a draft get: low, middle, high."""
NUM_QUICK = 2
MB = 10**6


def default_budgets(plan: ModelPlan, quick: bool) -> list[int]:
    """All but the slots, as the plan without a draft has it, and a share of the experts; in bytes, whole megabytes."""
    others = plan.tier_bytes("device") - plan.num_slots * plan.expert_bytes
    shares = SHARES[:NUM_QUICK] if quick else SHARES
    budgets = [_whole_megabytes(others + share * plan.num_experts * plan.expert_bytes) for share in shares]
    return list(dict.fromkeys(budgets))


def raised_budgets(budgets: Sequence[int], drafting: ModelPlan) -> tuple[list[int], list[str]]:
    """The budgets such that each holds a quantized draft and a slot, and what was changed.

    `drafting` is the plan with such a draft at the lowest budget.
    """
    lowest = min(budgets)
    least = _whole_megabytes(lowest + drafting.shortages.get("device", 0))
    notes = [
        f"A budget of {megabytes(budget)} does not hold the quantized draft and a slot: it becomes {megabytes(least)}."
        for budget in budgets
        if budget < least
    ]
    return list(dict.fromkeys(max(budget, least) for budget in budgets)), notes


def parse_budgets(text: str) -> list[int]:
    """The sizes of a list such as "700MB,1.5GB", each once."""
    try:
        sizes = [int(TypeAdapter(ByteSize).validate_python(word.strip())) for word in text.split(",")]
    except ValidationError:
        sizes = [0]
    if min(sizes) <= 0:
        raise ConfigError(f"--device-memory is {text!r}; write sizes such as 700MB,1.5GB.")
    return list(dict.fromkeys(sizes))


def _whole_megabytes(num_bytes: float) -> int:
    return int(-(-num_bytes // MB) * MB)
