"""How budgets of memory are divided: pure arithmetic, made before anything large is allocated."""

from typing import NamedTuple

DEVICE_MARGIN = 0.1
"""Share of free device memory that "auto" leaves to allocators, libraries and others."""
HOST_MARGIN = 0.2
"""Share of free host memory that "auto" leaves to the page cache, the server process and others."""
SHOWCASE_SLOT_SHARE = 0.25
"""What the demo model gets slots for by default, so that there is something to move."""


class MemoryNeeds(NamedTuple):
    """Bytes that are wanted on the device, whatever the number of slots."""

    dense: int
    draft: int
    kv_cache: int
    workspace: int

    @property
    def total(self) -> int:
        return sum(self)


class Budget(NamedTuple):
    num_bytes: int
    reason: str
    """Why it is what it is, for the end of a sentence."""


class SlotPlan(NamedTuple):
    num_slots: int
    shortage_bytes: int
    """By how much the device is too small; 0 where it is not."""


def device_budget(set_bytes: int | None, free_bytes: int, device_is_host: bool) -> Budget:
    """What the user has set, or else what is free less a margin."""
    if set_bytes is not None:
        return Budget(set_bytes, "as set")
    margin = HOST_MARGIN if device_is_host else DEVICE_MARGIN
    return Budget(int(free_bytes * (1 - margin)), f"what is free less {margin:.0%}")


def showcase_budget(needs: MemoryNeeds, expert_bytes: int, num_experts: int) -> Budget:
    """Room for a part of the experts."""
    num_slots = max(1, int(num_experts * SHOWCASE_SLOT_SHARE))
    return Budget(
        needs.total + num_slots * expert_bytes,
        f"made to hold {SHOWCASE_SLOT_SHARE:.0%} of the demo's experts; --device-memory changes it",
    )


def host_budget(set_bytes: int | None, free_bytes: int, device_is_host: bool) -> Budget:
    """What may hold full-precision experts in RAM."""
    if set_bytes is not None:
        return Budget(set_bytes, "as set")
    if device_is_host:
        return Budget(0, "none, since the device's memory is RAM already")
    return Budget(int(free_bytes * (1 - HOST_MARGIN)), f"what is free less {HOST_MARGIN:.0%}")


def plan_slots(
    needs: MemoryNeeds, expert_bytes: int, num_experts: int, budget_bytes: int, free_bytes: int | None
) -> SlotPlan:
    """Give what the needs leave of the budget to slots, at least one and at most one per expert.

    `free_bytes` is what the device really has; None where that is not known. What does not fit is told as a shortage.
    """
    least_bytes = needs.total + expert_bytes
    num_slots = min(num_experts, (budget_bytes - needs.total) // expert_bytes)
    if num_slots < 1:
        return SlotPlan(1, least_bytes - (budget_bytes if free_bytes is None else min(budget_bytes, free_bytes)))
    used_bytes = needs.total + num_slots * expert_bytes
    return SlotPlan(num_slots, 0 if free_bytes is None else max(0, used_bytes - free_bytes))
