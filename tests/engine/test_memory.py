"""Properties of the arithmetic: what is planned fits, nothing that fits is left out, and shortages are exact."""

from hypothesis import assume, given
from hypothesis import strategies as st

from engine.memory import (
    DEVICE_MARGIN,
    HOST_MARGIN,
    Budget,
    MemoryNeeds,
    SlotPlan,
    device_budget,
    host_budget,
    plan_slots,
    showcase_budget,
)

MB = 10**6
sizes = st.integers(0, 20_000 * MB)
needs_of_models = st.builds(MemoryNeeds, sizes, sizes, sizes, sizes)
expert_sizes = st.integers(1, 500 * MB)
expert_counts = st.integers(1, 500)
budgets = st.integers(0, 200_000 * MB)
free_sizes = st.none() | budgets
NEEDS = MemoryNeeds(dense=100 * MB, draft=40 * MB, kv_cache=30 * MB, workspace=10 * MB)


def plan(budget_bytes: int, free_bytes: int | None = None) -> SlotPlan:
    return plan_slots(NEEDS, 5 * MB, 64, budget_bytes, free_bytes)


def test_needs_add_up() -> None:
    assert NEEDS.total == 180 * MB


@given(needs_of_models, expert_sizes, expert_counts, budgets, free_sizes)
def test_whatever_is_planned_fits(
    needs: MemoryNeeds, expert_bytes: int, num_experts: int, budget_bytes: int, free_bytes: int | None
) -> None:
    slots = plan_slots(needs, expert_bytes, num_experts, budget_bytes, free_bytes)
    assert 1 <= slots.num_slots <= num_experts
    used_bytes = needs.total + slots.num_slots * expert_bytes
    has_room = used_bytes <= budget_bytes and (free_bytes is None or used_bytes <= free_bytes)
    assert (slots.shortage_bytes == 0) == has_room
    # Not one slot more would fit the budget, or be of use.
    assert slots.num_slots == num_experts or used_bytes + expert_bytes > budget_bytes


@given(needs_of_models, expert_sizes, expert_counts, budgets, free_sizes)
def test_a_shortage_is_exact(
    needs: MemoryNeeds, expert_bytes: int, num_experts: int, budget_bytes: int, free_bytes: int | None
) -> None:
    shortage = plan_slots(needs, expert_bytes, num_experts, budget_bytes, free_bytes).shortage_bytes
    assume(shortage)

    def with_more(num_bytes: int) -> SlotPlan:
        """Both budget and device are made as large as the smaller of them with so much more."""
        room = min(budget_bytes, budget_bytes if free_bytes is None else free_bytes) + num_bytes
        free = None if free_bytes is None else max(free_bytes, room)
        return plan_slots(needs, expert_bytes, num_experts, max(budget_bytes, room), free)

    assert with_more(shortage).shortage_bytes == 0
    assert with_more(shortage - 1).shortage_bytes == 1


def test_slots_are_what_the_needs_leave_of_the_budget() -> None:
    assert plan(185 * MB) == SlotPlan(1, 0)
    assert plan(190 * MB - 1) == SlotPlan(1, 0)
    assert plan(190 * MB) == SlotPlan(2, 0)


def test_a_budget_beyond_what_the_model_can_use_takes_no_more() -> None:
    assert plan(10**12) == SlotPlan(64, 0)
    assert plan(10**12, free_bytes=500 * MB) == SlotPlan(64, 0)


def test_a_budget_without_room_for_a_slot_is_short_of_one() -> None:
    assert plan(184 * MB) == SlotPlan(1, 1 * MB)
    assert plan(0) == SlotPlan(1, 185 * MB)


def test_the_smaller_of_budget_and_device_counts() -> None:
    assert plan(184 * MB, free_bytes=100 * MB) == SlotPlan(1, 85 * MB)
    assert plan(184 * MB, free_bytes=10**12) == SlotPlan(1, 1 * MB)
    assert plan(184 * MB, free_bytes=0) == SlotPlan(1, 185 * MB)


def test_slots_that_the_budget_wants_and_the_device_has_no_room_for() -> None:
    assert plan(400 * MB, free_bytes=400 * MB) == SlotPlan(44, 0)
    assert plan(400 * MB, free_bytes=399 * MB) == SlotPlan(44, 1 * MB)


@given(budgets, budgets)
def test_what_is_set_is_taken_as_it_is(set_bytes: int, free_bytes: int) -> None:
    assert device_budget(set_bytes, free_bytes, device_is_host=False) == Budget(set_bytes, "as set")
    for device_is_host in (False, True):
        assert host_budget(set_bytes, free_bytes, device_is_host) == Budget(set_bytes, "as set")


@given(budgets)
def test_automatic_budgets_leave_a_margin(free_bytes: int) -> None:
    device = device_budget(None, free_bytes, device_is_host=False)
    host = host_budget(None, free_bytes, device_is_host=False)
    assert abs(free_bytes - device.num_bytes - DEVICE_MARGIN * free_bytes) <= 1
    assert abs(free_bytes - host.num_bytes - HOST_MARGIN * free_bytes) <= 1


def test_the_margins_are_said() -> None:
    assert device_budget(None, 300 * MB, device_is_host=False) == Budget(270 * MB, "what is free less 10%")
    assert device_budget(None, 300 * MB, device_is_host=True) == Budget(240 * MB, "what is free less 20%")
    assert host_budget(None, 300 * MB, device_is_host=False) == Budget(240 * MB, "what is free less 20%")


def test_on_a_cpu_the_device_has_the_ram_already() -> None:
    budget = host_budget(None, 300 * MB, device_is_host=True)
    assert budget.num_bytes == 0
    assert "RAM already" in budget.reason


@given(needs_of_models, expert_sizes, expert_counts)
def test_the_demo_gets_room_for_a_quarter_of_its_experts(
    needs: MemoryNeeds, expert_bytes: int, num_experts: int
) -> None:
    budget = showcase_budget(needs, expert_bytes, num_experts)
    assert "25%" in budget.reason
    assert "--device-memory" in budget.reason
    slots = plan_slots(needs, expert_bytes, num_experts, budget.num_bytes, None)
    assert slots == SlotPlan(max(1, num_experts // 4), 0)
