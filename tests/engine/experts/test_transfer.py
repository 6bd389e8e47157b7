"""Transfers without threads: each is made by hand, or where a visit would wait for it."""

import logging
from collections.abc import Callable

import pytest

from engine.errors import TransferError
from engine.experts.layout import ExpertId
from tests.engine.experts.bench import EXPERT_BYTES, NUM_LAYERS, Bench


@pytest.fixture
def make_bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Bench]:
    """Benches without threads: whenever a visit would wait, one transfer is done instead."""

    def make(num_slots: int) -> Bench:
        bench = Bench(num_slots)

        def instead_of_waiting() -> None:
            assert bench.transfers.transfer_next() is not None, "the visit would wait for ever"

        monkeypatch.setattr(bench.transfers._changed, "wait", instead_of_waiting)
        return bench

    return make


MakeBench = Callable[[int], Bench]


def test_resident_experts_come_first_then_the_others_as_they_arrive(make_bench: MakeBench) -> None:
    bench = make_bench(4)
    bench.visit(0, 2)
    bench.visit(0, 0, 1, 2, 3)
    assert bench.computed == [(0, 2), (0, 2), (0, 0), (0, 1), (0, 3)]
    bench.check_idle()


def test_an_expert_that_arrives_during_compute_is_next(make_bench: MakeBench) -> None:
    bench = make_bench(4)
    bench.visit(0, 3)
    bench.visit(0, 0, 3, 1, then=lambda expert: bench.drain() if expert == 3 else None)
    assert bench.computed == [(0, 3), (0, 3), (0, 0), (0, 1)]


def test_a_visit_needs_no_more_than_one_slot(make_bench: MakeBench) -> None:
    bench = make_bench(1)
    for _ in range(2):
        bench.visit(0, 0, 1, 2, 3)
    # The one that is resident when the second visit begins is computed first.
    assert bench.computed == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 3), (0, 0), (0, 1), (0, 2)]
    bench.check_idle()


def test_a_demand_overtakes_the_plan(make_bench: MakeBench) -> None:
    bench = make_bench(4)
    bench.plan((1, 0), (1, 1), (2, 0))
    bench.visit(0, 0)
    assert bench.store.fetched == [(0, 0)]
    bench.drain()
    assert bench.store.fetched == [(0, 0), (1, 0), (1, 1), (2, 0)]


def test_a_prefetch_does_not_take_the_slot_that_a_demand_waits_for(make_bench: MakeBench) -> None:
    bench = make_bench(1)
    bench.visit(0, 0)
    bench.plan((1, 0))
    # While the only slot is in use nothing can be moved; afterwards the demand comes before the plan.
    bench.visit(0, 0, 1, then=lambda expert: bench.drain() if expert == 0 else None)
    assert bench.store.fetched == [(0, 0), (0, 1)]
    bench.drain()
    assert bench.store.fetched == [(0, 0), (0, 1), (1, 0)]


def test_the_plan_streams_through_fewer_slots_than_it_has_experts(make_bench: MakeBench) -> None:
    bench = make_bench(3)
    planned = [(layer, expert) for layer in range(NUM_LAYERS) for expert in range(2)]
    bench.plan(*planned)
    bench.drain()
    assert bench.store.fetched == planned[:3]
    for layer in range(NUM_LAYERS):
        bench.visit(layer, 0, 1)
        bench.drain()
    assert bench.store.fetched == planned
    stats = bench.transfers.stats()
    assert (stats.num_expert_hits, stats.num_expert_misses, stats.num_demand_fetches) == (6, 0, 0)
    assert (stats.num_prefetches_used, stats.num_prefetches_wasted) == (6, 0)
    bench.check_idle()


def test_planned_experts_are_kept_from_prefetches_but_not_from_demands(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    bench.plan((1, 0), (2, 0), (2, 1))
    bench.drain()
    assert bench.resident == {(1, 0), (2, 0)}
    bench.visit(0, 0)
    # The demand took the slot of what is used last, not that of what comes next.
    assert bench.resident == {(1, 0), (0, 0)}


def test_a_visited_layer_is_out_of_the_plan(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    bench.plan((0, 0), (0, 1), (1, 0))
    bench.drain()
    bench.visit(0, 0)
    # (0, 1) was predicted in vain: it is neither kept nor fetched again.
    bench.drain()
    assert (1, 0) in bench.resident
    bench.visit(1, 1)
    assert bench.store.fetched == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert bench.transfers.transfer_next() is None


def test_prefetches_of_a_layer_that_was_visited_are_not_made_up_for(make_bench: MakeBench) -> None:
    bench = make_bench(4)
    bench.plan((0, 0), (0, 1), (1, 0))
    bench.visit(0, 0)
    bench.drain()
    assert bench.store.fetched == [(0, 0), (1, 0)]


def test_forgetting_the_plan_cancels_what_has_not_started(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    bench.plan((0, 0), (0, 1), (1, 0))
    bench.drain()
    bench.transfers.forget_plan()
    assert bench.transfers.transfer_next() is None
    # What was planned before may go now.
    bench.plan((2, 0), (2, 1))
    bench.drain()
    assert bench.resident == {(2, 0), (2, 1)}
    assert bench.transfers.stats().num_prefetches_wasted == 2


def test_a_new_plan_replaces_the_old_one(make_bench: MakeBench) -> None:
    bench = make_bench(4)
    bench.plan((0, 0), (0, 1), (0, 2))
    assert bench.transfers.transfer_next() is not None
    bench.plan((0, 2), (0, 0), (1, 0))
    bench.drain()
    assert bench.store.fetched == [(0, 0), (0, 2), (1, 0)]


def test_a_failed_demand_fails_the_visit_and_not_the_next(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    bench.store.broken = {ExpertId(0, 1)}
    with pytest.raises(TransferError, match=r"could not be read: cannot read 0/1\.") as caught:
        bench.visit(0, 0, 1, 2)
    assert isinstance(caught.value.__cause__, OSError)
    bench.check_idle()
    assert (0, 1) not in bench.resident
    assert bench.transfers.transfer_next() is None  # the rest of the visit is not fetched for nobody

    bench.store.broken.clear()
    bench.computed.clear()
    bench.visit(0, 0, 1, 2)
    assert bench.computed == [(0, 0), (0, 1), (0, 2)]
    bench.check_idle()


def test_a_failed_slot_can_be_used_again(make_bench: MakeBench) -> None:
    bench = make_bench(1)
    bench.store.broken = {ExpertId(0, 0)}
    with pytest.raises(TransferError):
        bench.visit(0, 0)
    bench.visit(0, 1)
    assert bench.resident == {(0, 1)}


def test_a_failed_prefetch_is_logged_and_made_up_for_on_demand(
    make_bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench(2)
    bench.store.broken = {ExpertId(0, 0)}
    bench.plan((0, 0), (0, 1))
    with caplog.at_level(logging.WARNING):
        bench.drain()
    assert "cannot read 0/0" in caplog.text
    assert bench.resident == {(0, 1)}
    bench.check_idle()

    bench.store.broken.clear()
    bench.visit(0, 0, 1)
    assert bench.computed == [(0, 1), (0, 0)]
    assert bench.store.fetched == [(0, 0), (0, 1), (0, 0)]


def test_an_error_in_compute_leaves_no_slot_in_use(make_bench: MakeBench) -> None:
    bench = make_bench(3)
    bench.visit(0, 0, 1)

    def fail(expert: int) -> None:
        if expert == 0:
            bench.drain()  # so that one more has arrived, and is pinned, when the error comes
            raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        bench.visit(0, 0, 1, 2, 3, then=fail)
    bench.check_idle()
    assert bench.transfers.transfer_next() is None
    bench.visit(0, 0, 1, 2, 3)
    assert sorted(bench.computed[-4:]) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    bench.check_idle()


def test_counters_of_a_small_script(make_bench: MakeBench) -> None:
    bench = make_bench(3)
    bench.plan((0, 0), (1, 0), (1, 1), (2, 0))
    bench.drain()
    # 0/0 hit; while it is in use 0/2 comes on demand, in the slot of 1/1, planned last of what is resident.
    bench.visit(0, 0, 2, then=lambda expert: bench.drain() if expert == 0 else None)
    stats = bench.transfers.stats()
    assert (stats.num_expert_hits, stats.num_expert_misses) == (1, 1)
    assert (stats.num_demand_fetches, stats.demand_bytes, stats.prefetch_bytes) == (
        1,
        EXPERT_BYTES,
        3 * EXPERT_BYTES,
    )
    assert (stats.num_evictions, stats.num_prefetches_used, stats.num_prefetches_wasted) == (1, 1, 1)

    # 1/1 is planned but lost its slot: fetching it now is still the plan's doing.
    bench.visit(1, 0, 1)
    step = bench.transfers.stats() - stats
    assert (step.num_expert_hits, step.num_expert_misses) == (1, 1)
    assert (step.num_demand_fetches, step.demand_bytes, step.prefetch_bytes) == (0, 0, EXPERT_BYTES)
    assert step.num_prefetches_used == 2
    bench.drain()
    assert bench.store.fetched == [(0, 0), (1, 0), (1, 1), (0, 2), (1, 1), (2, 0)]
    assert bench.transfers.moved_bytes == 6 * EXPERT_BYTES
    bench.check_idle()


def test_what_was_predicted_in_vain_makes_room_for_what_the_layer_wants_instead(make_bench: MakeBench) -> None:
    bench = make_bench(3)
    bench.plan((0, 0), (0, 1), (1, 0), (1, 1))
    bench.drain()
    bench.visit(0, 0, 2, then=lambda expert: bench.drain() if expert == 0 else None)
    assert bench.resident == {(0, 0), (0, 2), (1, 0)}
    assert bench.transfers.stats().num_prefetches_wasted == 1


def test_a_planned_expert_that_lost_its_slot_to_a_demand_is_prefetched_again(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    bench.plan((1, 0), (2, 0))
    bench.drain()
    bench.visit(0, 0)
    assert bench.resident == {(0, 0), (1, 0)}
    bench.drain()
    assert bench.store.fetched == [(1, 0), (2, 0), (0, 0), (2, 0)]
    assert bench.resident == {(1, 0), (2, 0)}


def test_a_plan_tells_the_bytes_that_are_yet_to_be_moved(make_bench: MakeBench) -> None:
    bench = make_bench(4)
    bench.visit(0, 0)
    predicted = [ExpertId(0, 0), ExpertId(0, 1), ExpertId(1, 0)]
    assert bench.transfers.plan(predicted) == 2 * EXPERT_BYTES
    assert bench.transfers.transfer_next() is not None
    assert bench.transfers.plan(predicted) == EXPERT_BYTES
    assert bench.transfers.moved_bytes == 2 * EXPERT_BYTES


def test_a_visit_may_replace_the_plan_behind_what_it_needs_itself(make_bench: MakeBench) -> None:
    bench = make_bench(4)
    bench.plan((1, 0), (2, 0))
    bench.transfers.visit(0, {0: [0]}, 1, lambda expert, record: bench.drain(), [ExpertId(1, 1), ExpertId(1, 2)])
    assert bench.store.fetched == [(0, 0), (1, 1), (1, 2)]
    # None says nothing about the plan, and an empty one takes it away.
    bench.plan((2, 0), (2, 1))
    bench.transfers.visit(1, {1: [0]}, 1, lambda expert, record: None)
    assert bench.transfers.transfer_next() is not None
    bench.transfers.visit(1, {1: [0]}, 1, lambda expert, record: None, [])
    assert bench.transfers.transfer_next() is None
    assert bench.store.fetched[3:] == [(2, 0)]


def test_a_second_use_of_a_prefetched_expert_is_no_second_success(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    bench.plan((0, 0))
    bench.drain()
    bench.visit(0, 0)
    bench.visit(0, 0)
    assert bench.transfers.stats().num_prefetches_used == 1
    assert bench.transfers.stats().num_expert_hits == 2


def test_a_failed_fetch_counts_the_bytes_that_were_asked_for_and_ends(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    bench.store.broken = {ExpertId(0, 0)}
    with pytest.raises(TransferError):
        bench.visit(0, 0)
    assert bench.transfers.stats().demand_bytes == EXPERT_BYTES
    before = bench.transfers.stats().transfer_seconds
    assert bench.transfers.stats().transfer_seconds == before  # nothing is in flight any more


def test_waiting_and_transferring_are_timed(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("time.perf_counter", lambda: now)
    bench = make_bench(4)
    bench.store.on_fetch = lambda expert: pass_time(2.0)
    bench.plan((0, 0))
    bench.drain()
    pass_time(1000.0)  # the link is idle
    bench.visit(0, 0, 1, 2, then=lambda expert: pass_time(50.0))
    stats = bench.transfers.stats()
    assert stats.transfer_seconds == 6.0
    assert stats.transfer_wait_seconds == 4.0


def test_an_unfinished_transfer_counts_up_to_now(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    seen: list[float] = []
    monkeypatch.setattr("time.perf_counter", lambda: now)
    bench = make_bench(1)

    def look(expert: ExpertId) -> None:
        nonlocal now
        now = 3.0
        seen.append(bench.transfers.stats().transfer_seconds)
        now = 5.0

    bench.store.on_fetch = look
    bench.plan((0, 0))
    bench.drain()
    assert seen == [3.0]
    assert bench.transfers.stats().transfer_seconds == 5.0


def test_closed_transfers_serve_what_is_resident_and_refuse_the_rest(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    bench.visit(0, 0)
    bench.transfers.close()
    bench.transfers.close()
    bench.visit(0, 0)
    with pytest.raises(TransferError, match="closing"):
        bench.visit(0, 0, 1)
    bench.check_idle()
