import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.device import DONE, CpuDevice, DoneEvent, Event
from engine.errors import TransferError
from engine.experts.cache import ExpertCache, SlotState
from engine.experts.layout import ExpertId
from engine.experts.policy import PerLayerLru
from engine.experts.transfer import ExpertTransfers

EXPERT_BYTES = 16
NUM_LAYERS = 3


def mark_of(expert: ExpertId) -> int:
    """What the expert's record is filled with."""
    return 1 + 16 * expert.layer + expert.expert


class FakeStore:
    """Records of one repeated byte. Remembers what was fetched, and fails for what is in `broken`."""

    def __init__(self) -> None:
        self.fetched: list[ExpertId] = []
        self.broken: set[ExpertId] = set()
        self.on_fetch: Callable[[ExpertId], None] = lambda expert: None

    def fetch(self, expert: ExpertId, destination: torch.Tensor) -> Event:
        self.fetched.append(expert)
        destination.fill_(0xFF)
        self.on_fetch(expert)
        if expert in self.broken:
            raise OSError(f"cannot read {expert.layer}/{expert.expert}")
        destination.fill_(mark_of(expert))
        return DONE

    def close(self) -> None:
        pass


class Bench:
    """Transfers with a fake store, and what was computed."""

    def __init__(self, num_slots: int) -> None:
        self.store = FakeStore()
        self.cache = ExpertCache(
            torch.zeros(num_slots, EXPERT_BYTES, dtype=torch.uint8), PerLayerLru(num_slots, NUM_LAYERS)
        )
        self.transfers = ExpertTransfers(self.cache, self.store, CpuDevice())
        self.computed: list[tuple[int, int]] = []

    def plan(self, *experts: tuple[int, int]) -> None:
        self.transfers.plan([ExpertId(*expert) for expert in experts])

    def drain(self) -> None:
        """Transfer until there is nothing to do or no slot to do it with."""
        while self.transfers.transfer_next() is not None:
            pass

    def visit(self, layer: int, *experts: int, then: Callable[[int], None] = lambda expert: None) -> None:
        """Visit, with a compute that checks the record, and then does something."""

        def compute(expert: int, record: torch.Tensor) -> None:
            assert record.tolist() == [mark_of(ExpertId(layer, expert))] * EXPERT_BYTES
            self.computed.append((layer, expert))
            then(expert)

        self.transfers.visit(layer, experts, compute)

    @property
    def resident(self) -> set[ExpertId | None]:
        return {slot.owner for slot in self.cache._slots if slot.state is SlotState.READY}

    def check_idle(self) -> None:
        """No invariant is broken, and nothing is left in use or in flight."""
        self.transfers.check_integrity()
        assert all(slot.num_users == 0 for slot in self.cache._slots)
        assert all(slot.state is not SlotState.LOADING for slot in self.cache._slots)


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
    bench.plan((0, 0), (0, 1), (1, 0), (1, 1))
    bench.drain()
    # 0/0 hit; 0/2 demanded, which takes the slot of 1/0, planned last of what is resident.
    bench.visit(0, 0, 2)
    stats = bench.transfers.stats()
    assert (stats.num_expert_hits, stats.num_expert_misses) == (1, 1)
    assert (stats.num_demand_fetches, stats.demand_bytes, stats.prefetch_bytes) == (
        1,
        EXPERT_BYTES,
        3 * EXPERT_BYTES,
    )
    assert (stats.num_evictions, stats.num_prefetches_used, stats.num_prefetches_wasted) == (1, 1, 1)

    # 1/1 comes by the plan, in the slot of 0/0, the least recently used of the fullest layer. 1/0 is planned but lost
    # its slot: fetching it now is still the plan's doing.
    bench.drain()
    bench.visit(1, 0, 1)
    step = bench.transfers.stats() - stats
    assert (step.num_expert_hits, step.num_expert_misses) == (1, 1)
    assert (step.num_demand_fetches, step.demand_bytes, step.prefetch_bytes) == (0, 0, 2 * EXPERT_BYTES)
    assert step.num_prefetches_used == 2
    assert len(bench.store.fetched) == 6
    bench.check_idle()


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


# With transfer threads.


def run_all(*tasks: Callable[[], object]) -> list[BaseException | None]:
    """Run each in a thread of its own to the end, and return what it raised; fails where one hangs."""
    errors: list[BaseException | None] = [None] * len(tasks)

    def run(index: int) -> None:
        try:
            tasks[index]()
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return errors


@contextmanager
def started(bench: Bench, num_threads: int) -> Iterator[None]:
    bench.transfers.start(num_threads)
    try:
        yield
    finally:
        assert run_all(bench.transfers.close) == [None]
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("transfer-")]
        bench.check_idle()


def test_one_thread_keeps_the_order_of_the_plan() -> None:
    bench = Bench(6)
    planned = [(layer, expert) for layer in range(NUM_LAYERS) for expert in range(2)]
    bench.plan(*planned)

    def one_pass() -> None:
        for layer in range(NUM_LAYERS):
            bench.visit(layer, 0, 1)

    with started(bench, 1):
        assert run_all(one_pass) == [None]
    # The visits ask for some before they have come by the plan, but in the same order.
    assert bench.store.fetched == planned


@pytest.mark.parametrize(("num_threads", "num_slots"), [(1, 1), (2, 1), (2, 3), (3, 5)])
def test_many_visits_with_changing_plans(num_threads: int, num_slots: int) -> None:
    bench = Bench(num_slots)
    dice = random.Random(num_slots)

    def some(layer: int) -> list[tuple[int, int]]:
        return [(layer, expert) for expert in dice.sample(range(6), dice.randint(1, 4))]

    expected: list[tuple[int, int]] = []

    def passes() -> None:
        for _ in range(60):
            bench.plan(*(expert for layer in range(NUM_LAYERS) for expert in some(layer)))
            for layer in range(NUM_LAYERS):
                wanted = some(layer)
                expected.extend(wanted)
                bench.visit(layer, *(expert for _, expert in wanted))
                bench.transfers.check_integrity()
            if dice.random() < 0.2:
                bench.transfers.forget_plan()

    with started(bench, num_threads):
        assert run_all(passes) == [None]
    assert sorted(bench.computed) == sorted(expected)
    stats = bench.transfers.stats()
    assert stats.num_expert_hits + stats.num_expert_misses == len(expected)
    assert stats.prefetch_bytes + stats.demand_bytes == EXPERT_BYTES * len(bench.store.fetched)
    assert stats.demand_bytes == EXPERT_BYTES * stats.num_demand_fetches


def test_failures_here_and_there_do_not_stop_the_threads() -> None:
    bench = Bench(3)
    dice = random.Random(1)
    num_failed = 0
    lock = threading.Lock()

    def fail_sometimes(expert: ExpertId) -> None:
        with lock:
            if dice.random() < 0.1:
                raise OSError("a bad block")

    def passes() -> None:
        nonlocal num_failed
        for index in range(100):
            bench.plan((1, 0), (1, 1), (2, 0))
            for layer in range(NUM_LAYERS):
                try:
                    bench.visit(layer, index % 4, (index + 1) % 4)
                except TransferError:
                    num_failed += 1

    bench.store.on_fetch = fail_sometimes
    with started(bench, 2):
        assert run_all(passes) == [None]
    assert 0 < num_failed < 300


class Gate:
    """Holds fetches of some experts until it is opened."""

    def __init__(self, bench: Bench, experts: Iterable[tuple[int, int]]) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        held = set(experts)

        def hold(expert: ExpertId) -> None:
            if expert in held:
                self.reached.set()
                assert self.opened.wait(10)

        bench.store.on_fetch = hold


def test_close_while_a_visit_waits_fails_the_visit() -> None:
    bench = Bench(2)
    gate = Gate(bench, [(0, 0)])
    bench.transfers.start(1)
    visited = threading.Event()

    def visit() -> None:
        try:
            bench.visit(0, 0)
        finally:
            visited.set()

    def close() -> None:
        assert gate.reached.wait(10)
        bench.transfers.close()

    def open_gate() -> None:
        # The visit ends before the transfer does.
        assert visited.wait(10)
        gate.opened.set()

    error, *others = run_all(visit, close, open_gate)
    assert isinstance(error, TransferError)
    assert "closing" in str(error)
    assert others == [None, None]
    assert bench.computed == []
    bench.check_idle()


def begin_waiting(bench: Bench) -> threading.Event:
    """An event that is set once a visit waits for an expert."""
    waits = threading.Event()
    real_wait = bench.transfers._changed.wait

    def wait(timeout: float | None = None) -> bool:
        if not threading.current_thread().name.startswith("transfer-"):
            waits.set()
        return real_wait(timeout)

    bench.transfers._changed.wait = wait  # type: ignore[method-assign]
    return waits


@pytest.mark.parametrize("fails", [False, True])
def test_a_visit_joins_the_prefetch_that_is_under_way(fails: bool) -> None:
    bench = Bench(2)
    gate = Gate(bench, [(0, 0)])
    waits = begin_waiting(bench)
    if fails:
        bench.store.broken = {ExpertId(0, 0)}
    bench.plan((0, 0))

    def visit() -> None:
        assert gate.reached.wait(10)
        bench.visit(0, 0)

    def open_gate() -> None:
        assert waits.wait(10)
        gate.opened.set()

    with started(bench, 2):
        error, other = run_all(visit, open_gate)
    assert isinstance(error, TransferError) if fails else error is None
    assert other is None
    assert bench.store.fetched == [(0, 0)]
    stats = bench.transfers.stats()
    assert (stats.num_expert_misses, stats.num_demand_fetches) == (1, 0)
    assert stats.num_prefetches_used == (0 if fails else 1)


def test_an_awaited_expert_is_not_taken_before_it_is_computed() -> None:
    # One slot, two demands and a plan: each arrival must survive until the visit has used it.
    bench = Bench(1)
    bench.plan((1, 0), (1, 1))

    def visits() -> None:
        for _ in range(50):
            bench.visit(0, 0, 1, 2)

    with started(bench, 2):
        assert run_all(visits) == [None]
    assert len(bench.computed) == 150


class BrokenEvent(DoneEvent):
    """The copy is enqueued, and the device breaks down before it is done."""

    def synchronize(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the device fell off the bus")


def test_a_breakdown_of_the_device_fails_visits_instead_of_hanging_them(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(num_slots=2)
    monkeypatch.setattr(bench.store, "fetch", lambda expert, destination: BrokenEvent())
    with started(bench, num_threads=1):
        for _ in range(2):
            with pytest.raises(TransferError, match="fell off the bus"):
                bench.transfers.visit(0, [0, 1, 2], lambda expert, record: None)
    bench.transfers.check_integrity()
