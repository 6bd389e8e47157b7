"""Transfers by threads: order, failures and ends, whatever the threads do when."""

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest

from engine.device import DoneEvent
from engine.errors import TransferError
from engine.experts.layout import ExpertId
from tests.engine.experts.bench import EXPERT_BYTES, NUM_LAYERS, Bench


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
    monkeypatch.setattr(bench.store, "fetch", lambda expert, destination, offset: BrokenEvent())
    with started(bench, num_threads=1):
        for _ in range(2):
            with pytest.raises(TransferError, match="fell off the bus"):
                bench.transfers.visit(0, {0: [0], 1: [0], 2: [0]}, 1, lambda expert, record: None)
    bench.transfers.check_integrity()
