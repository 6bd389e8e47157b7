"""The forecast's formulas against routing that is drawn at random as they assume."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.forecast import ACCEPTANCE_RATE, accepted_tokens, distinct_experts, forecast
from engine.protocol import Forecast

EXPERT_BYTES = 1000


def forecast_of(
    layers: Sequence[int], top_k: int, draft_length: int, num_slots: int, num_host_experts: int = 0
) -> Forecast:
    return forecast(
        layers,
        top_k,
        EXPERT_BYTES,
        draft_length=draft_length,
        num_slots=num_slots,
        num_host_experts=num_host_experts,
    )


def simulated_bytes(layers: Sequence[int], top_k: int, draft_length: int, num_slots: int, num_cycles: int) -> float:
    """Bytes per token where every cycle routes each of its tokens anew and finds other experts resident."""
    draw = random.Random(0)
    experts = [(layer, expert) for layer, count in enumerate(layers) for expert in range(count)]
    num_missed = num_tokens = 0
    for _ in range(num_cycles):
        resident = set(draw.sample(experts, num_slots))
        visited = {
            (layer, expert)
            for layer, count in enumerate(layers)
            for _ in range(draft_length + 1)
            for expert in draw.sample(range(count), min(top_k, count))
        }
        num_missed += len(visited - resident)
        num_accepted = 0
        while num_accepted < draft_length and draw.random() < ACCEPTANCE_RATE:
            num_accepted += 1
        num_tokens += num_accepted + 1
    return num_missed * EXPERT_BYTES / num_tokens


@pytest.mark.parametrize(
    ("layers", "top_k", "draft_length", "num_slots"),
    [
        ([8, 8, 8], 2, 0, 6),
        ([8, 8, 8], 2, 4, 6),
        ([64, 64], 6, 4, 40),
        ([16, 4, 2], 4, 2, 5),  # layers differ, and one has fewer experts than a token wants
        ([32], 8, 8, 1),
    ],
)
def test_simulated_routing_moves_as_much(layers: list[int], top_k: int, draft_length: int, num_slots: int) -> None:
    """Within 3%; the standard error of 4000 cycles is below 1%."""
    expected = forecast_of(layers, top_k, draft_length, num_slots).disk_bytes_per_token
    assert simulated_bytes(layers, top_k, draft_length, num_slots, 4000) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("num_tokens", [1, 3, 10])
def test_distinct_experts_of_some_tokens(num_tokens: int) -> None:
    """Within 2%; the standard error of 4000 draws is below 0.5%."""
    draw = random.Random(1)
    counts = [len({e for _ in range(num_tokens) for e in draw.sample(range(16), 3)}) for _ in range(4000)]
    assert sum(counts) / len(counts) == pytest.approx(distinct_experts(16, 3, num_tokens), rel=0.02)


def test_distinct_experts_at_the_limits() -> None:
    assert distinct_experts(16, 3, 0) == 0
    assert distinct_experts(16, 3, 1) == pytest.approx(3)
    assert distinct_experts(16, 16, 1) == 16
    assert distinct_experts(16, 3, 1000) == pytest.approx(16)


@given(st.floats(0, 0.99), st.integers(0, 32))
def test_accepted_tokens_are_the_closed_form(rate: float, draft_length: int) -> None:
    closed = (1 - rate ** (draft_length + 1)) / (1 - rate)
    assert accepted_tokens(draft_length, rate) == pytest.approx(closed)


def test_accepted_tokens_at_the_limits() -> None:
    assert accepted_tokens(0) == 1
    assert accepted_tokens(4, 0.0) == 1
    assert accepted_tokens(4, 1.0) == 5
    assert accepted_tokens(4) == pytest.approx(1 + 0.8 + 0.64 + 0.512 + 0.4096)


def test_without_a_draft_each_layer_moves_the_experts_of_one_token() -> None:
    moved = forecast_of([8, 8, 8], 2, draft_length=0, num_slots=0)
    assert moved.host_bytes_per_token == 0
    assert moved.disk_bytes_per_token == pytest.approx(3 * 2 * EXPERT_BYTES)


def test_experts_that_are_all_resident_move_nothing() -> None:
    for draft_length in (0, 4):
        moved = forecast_of([8, 8, 8], 2, draft_length, num_slots=24, num_host_experts=12)
        assert moved == Forecast(draft_length, 24, 0.0, 0.0)


def test_bytes_come_out_of_each_tier_as_experts_lie_there() -> None:
    from_disk = forecast_of([8, 8], 2, 4, num_slots=4)
    mixed = forecast_of([8, 8], 2, 4, num_slots=4, num_host_experts=12)
    assert from_disk.host_bytes_per_token == 0
    assert mixed.host_bytes_per_token == pytest.approx(0.75 * from_disk.disk_bytes_per_token)
    assert mixed.disk_bytes_per_token == pytest.approx(0.25 * from_disk.disk_bytes_per_token)
    assert forecast_of([8, 8], 2, 4, 4, num_host_experts=16).disk_bytes_per_token == 0


@given(st.integers(0, 15))
def test_a_slot_more_moves_less(num_slots: int) -> None:
    fewer, more = (forecast_of([8, 8], 2, 4, slots).disk_bytes_per_token for slots in (num_slots, num_slots + 1))
    assert more < fewer


def test_the_floor_is_the_time_of_the_slower_link() -> None:
    both = Forecast(4, 10, host_bytes_per_token=6e9, disk_bytes_per_token=1e9)
    assert both.floor_seconds({"host": 12e9, "disk": 1e9}) == pytest.approx(1.0)
    assert both.floor_seconds({"host": 3e9, "disk": 1e9}) == pytest.approx(2.0)


def test_the_floor_is_not_known_where_a_link_that_is_used_is_not() -> None:
    both = Forecast(4, 10, host_bytes_per_token=6e9, disk_bytes_per_token=1e9)
    assert both.floor_seconds({"host": 12e9}) is None
    assert both.floor_seconds({"disk": 1e9}) is None
    assert both.floor_seconds({"host": 12e9, "disk": 0.0}) is None
    assert Forecast(4, 10, 6e9, 0.0).floor_seconds({"host": 12e9}) == pytest.approx(0.5)


def test_where_nothing_moves_there_is_no_floor() -> None:
    assert Forecast(4, 10, 0.0, 0.0).floor_seconds({}) == 0.0
