import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.errors import InsufficientMemoryError
from engine.memory import CUDA_MARGIN, MemoryNeeds, MemoryPlan, memory_rows, plan_memory

MB = 10**6
sizes = st.integers(0, 20_000 * MB)
needs_of_models = st.builds(MemoryNeeds, sizes, sizes, sizes, sizes)
NEEDS = MemoryNeeds(dense=100 * MB, draft=40 * MB, kv_cache=30 * MB, workspace=10 * MB)


def plan(
    needs: MemoryNeeds = NEEDS,
    *,
    expert_bytes: int = 5 * MB,
    num_experts: int = 64,
    budget_bytes: int | None = None,
    free_bytes: int = 10**12,
    is_cuda: bool = False,
) -> MemoryPlan:
    return plan_memory(
        needs,
        expert_bytes=expert_bytes,
        num_experts=num_experts,
        budget_bytes=budget_bytes,
        free_bytes=free_bytes,
        is_cuda=is_cuda,
    )


@given(
    needs_of_models,
    st.integers(1, 500 * MB),
    st.integers(1, 500),
    st.one_of(st.none(), st.integers(1, 200_000 * MB)),
    st.integers(0, 200_000 * MB),
    st.booleans(),
)
def test_whatever_is_planned_fits(
    needs: MemoryNeeds,
    expert_bytes: int,
    num_experts: int,
    budget_bytes: int | None,
    free_bytes: int,
    is_cuda: bool,
) -> None:
    def planned() -> MemoryPlan:
        return plan(
            needs,
            expert_bytes=expert_bytes,
            num_experts=num_experts,
            budget_bytes=budget_bytes,
            free_bytes=free_bytes,
            is_cuda=is_cuda,
        )

    try:
        memory = planned()
    except InsufficientMemoryError:
        # Refused is only a budget that has no room for a slot, or of which more would be used than is free.
        default = (
            int(free_bytes * (1 - CUDA_MARGIN)) if is_cuda else needs.total + max(1, num_experts // 4) * expert_bytes
        )
        budget = default if budget_bytes is None else budget_bytes
        num_slots = min(num_experts, (budget - needs.total) // expert_bytes)
        assert num_slots < 1 or needs.total + num_slots * expert_bytes > free_bytes
        return
    assert 1 <= memory.num_slots <= num_experts
    used = needs.total + memory.num_slots * expert_bytes
    assert used <= memory.budget_bytes
    assert used <= free_bytes
    # Not one slot more would fit, or be of use.
    assert memory.num_slots == num_experts or used + expert_bytes > memory.budget_bytes
    rows = memory_rows(needs, memory, expert_bytes, num_experts)
    assert sum(row.num_bytes for row in rows) == used
    assert all(row.tier == "device" for row in rows)


def megabytes(pattern: str, message: str) -> int:
    found = re.search(pattern, message)
    assert found is not None, message
    return int(found[1])


@given(needs_of_models, st.integers(1, 500 * MB), st.integers(1, 500), st.integers(0, 80_000 * MB), st.booleans())
def test_a_budget_that_is_too_small_can_be_raised_to_what_the_message_says(
    needs: MemoryNeeds, expert_bytes: int, num_experts: int, budget_bytes: int, is_cuda: bool
) -> None:
    assume(budget_bytes < needs.total + expert_bytes)
    with pytest.raises(InsufficientMemoryError) as caught:
        plan(needs, expert_bytes=expert_bytes, num_experts=num_experts, budget_bytes=budget_bytes, is_cuda=is_cuda)
    message = str(caught.value)
    assert megabytes(r"device_memory is (\d+) MB", message) * MB - budget_bytes in range(MB)
    enough = megabytes(r"needs at least (\d+) MB", message) * MB
    assert enough < needs.total + expert_bytes + MB
    memory = plan(
        needs,
        expert_bytes=expert_bytes,
        num_experts=num_experts,
        budget_bytes=enough,
        is_cuda=is_cuda,
    )
    assert memory.num_slots >= 1


@given(needs_of_models, st.integers(1, 500 * MB), st.integers(1, 500), st.integers(0, 200_000 * MB), st.booleans())
def test_a_budget_beyond_what_is_free_can_be_lowered_to_what_the_message_says(
    needs: MemoryNeeds, expert_bytes: int, num_experts: int, free_bytes: int, is_cuda: bool
) -> None:
    everything = needs.total + num_experts * expert_bytes
    assume(everything > free_bytes)
    with pytest.raises(InsufficientMemoryError) as caught:
        plan(
            needs,
            expert_bytes=expert_bytes,
            num_experts=num_experts,
            budget_bytes=everything,
            free_bytes=free_bytes,
            is_cuda=is_cuda,
        )
    message = str(caught.value)
    possible = megabytes(r"only (\d+) MB is free", message) * MB
    assert possible <= free_bytes
    if needs.total + expert_bytes > free_bytes:
        assert "This model needs at least" in message
        assert "set --device-memory" not in message  # no value of it would help
        return
    assert "set --device-memory to no more than that" in message
    assume(possible >= needs.total + expert_bytes)  # it may have been rounded down by less than a megabyte
    memory = plan(
        needs,
        expert_bytes=expert_bytes,
        num_experts=num_experts,
        budget_bytes=possible,
        free_bytes=free_bytes,
        is_cuda=is_cuda,
    )
    assert memory.num_slots >= 1


def test_the_message_names_every_part_and_every_remedy() -> None:
    with pytest.raises(InsufficientMemoryError) as caught:
        plan(budget_bytes=150 * MB)
    message = str(caught.value)
    assert "device_memory is 150 MB" in message
    assert "needs at least 185 MB" in message
    assert "dense 100 MB, draft 40 MB, kv cache 30 MB, workspace 10 MB, one expert slot 5 MB" in message
    for remedy in ("--device-memory", "--max-model-len", "--no-draft"):
        assert remedy in message


@pytest.mark.parametrize(
    ("budget_bytes", "num_slots"), [(185 * MB, 1), (190 * MB - 1, 1), (190 * MB, 2), (10_000 * MB, 64)]
)
def test_slots_are_what_the_needs_leave_of_the_budget(budget_bytes: int, num_slots: int) -> None:
    memory = plan(budget_bytes=budget_bytes)
    assert memory == MemoryPlan(budget_bytes, num_slots, "device memory as set")


def test_cuda_takes_what_is_free_less_a_margin() -> None:
    memory = plan(free_bytes=300 * MB, is_cuda=True)
    assert memory.budget_bytes == 270 * MB
    assert memory.num_slots == 18
    assert "10%" in memory.reason


@pytest.mark.parametrize(("num_experts", "num_slots"), [(64, 16), (1, 1), (7, 1), (8, 2)])
def test_a_cpu_makes_room_for_a_quarter_of_the_experts(num_experts: int, num_slots: int) -> None:
    memory = plan(num_experts=num_experts)
    assert memory.num_slots == num_slots
    assert memory.budget_bytes == 180 * MB + num_slots * 5 * MB
    assert "25%" in memory.reason
    assert "--device-memory" in memory.reason


def test_a_budget_beyond_what_the_model_can_use_is_no_error() -> None:
    assert plan(budget_bytes=10**12, free_bytes=600 * MB).num_slots == 64


def test_rows_say_what_the_slots_hold() -> None:
    memory = plan(budget_bytes=260 * MB)
    rows = {row.part: row for row in memory_rows(NEEDS, memory, 5 * MB, 64)}
    assert rows["expert slots"].num_bytes == 80 * MB
    assert rows["expert slots"].note == "16, for 25% of the experts"
    assert rows["KV cache"].num_bytes == 30 * MB
