"""Statistics against values that were computed by hand: a reply has two cycles of three tokens in 0.3 s each."""

import pytest

from engine.protocol import CycleStats
from server.bench.measures import Counters, Position, acceptance_by_position, measure, quantile
from tests.server.bench.examples import CYCLE, changed, reply

BANDWIDTH = 300e6


def counted(*cycles: CycleStats, bandwidth: float | None = BANDWIDTH) -> Counters:
    counters = measure([reply(0.1, *cycles)], bandwidth).counters
    assert counters is not None
    return counters


def test_times_of_several_replies() -> None:
    measures = measure([reply(tpot) for tpot in (0.1, 0.2, 0.4)], BANDWIDTH)
    assert (measures.num_replies, measures.num_decode_tokens) == (3, 18)
    assert measures.tpot_median_seconds == pytest.approx(0.2)
    assert measures.tpot_p90_seconds == pytest.approx(0.36)
    assert measures.tpot_low_seconds == pytest.approx(0.1)
    assert measures.tpot_high_seconds == pytest.approx(0.4)
    assert measures.ttft_median_seconds == 2.0


def test_quantiles_lie_between_neighbours() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0, 2.0], 0.9) == pytest.approx(1.9)
    assert quantile([7.0], 0.9) == 7.0


def test_per_token_and_per_cycle() -> None:
    counters = counted()
    assert counters.draft_seconds_per_token == pytest.approx(0.02)
    assert counters.plan_seconds_per_token == pytest.approx(0.001)
    assert counters.wait_seconds_per_token == pytest.approx(0.01)
    assert counters.verify_seconds_per_token == pytest.approx(0.03)
    assert counters.bytes_per_token == 20_000_000
    assert counters.hit_rate == 0.75
    assert (counters.num_prefetches_used, counters.num_prefetches_wasted, counters.num_demand_fetches) == (16, 4, 4)
    assert (counters.tokens_per_cycle, counters.mean_draft_length, counters.acceptance_rate) == (3, 4, 0.5)
    assert counters.link_utilisation == pytest.approx(0.5)
    assert counters.link_bandwidth == pytest.approx(400e6)


def test_the_floor_is_the_larger_of_link_and_computation_per_token() -> None:
    """60 MB per cycle take 0.2 s, drafting and verification 0.15 s; with three times the bandwidth those are more."""
    counters = counted()
    assert counters.floor_seconds == pytest.approx(0.2 / 3)
    assert counters.tpot_over_floor == pytest.approx(1.5)
    assert counters.ttft_floor_seconds == pytest.approx(1.0)
    assert counters.ttft_over_floor == pytest.approx(2.0)
    assert counted(bandwidth=900e6).floor_seconds == pytest.approx(0.15 / 3)
    unknown = counted(bandwidth=None)
    assert (unknown.floor_seconds, unknown.tpot_over_floor, unknown.ttft_over_floor) == (None, None, None)


def test_a_position_is_judged_where_all_before_it_were_accepted() -> None:
    cycles = [
        CycleStats(num_draft_tokens=drafted, num_accepted_tokens=n) for drafted, n in ((4, 2), (3, 3), (0, 0), (1, 0))
    ]
    assert acceptance_by_position(cycles) == [Position(3, 2), Position(2, 2), Position(2, 1)]
    assert acceptance_by_position([]) == []


def test_without_a_draft_nothing_is_accepted() -> None:
    counters = counted(changed(CYCLE, num_draft_tokens=0, num_accepted_tokens=0))
    assert counters.acceptance_rate is None
    assert counters.acceptance_by_position == []


def test_an_engine_that_counts_nothing_has_times_only() -> None:
    measures = measure([reply(0.1, CycleStats())], BANDWIDTH)
    assert measures.counters is None
    assert measures.tpot_median_seconds == pytest.approx(0.1)
