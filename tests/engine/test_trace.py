import threading

import pytest

from engine.protocol import TraceEvent
from engine.trace import NO_TRACE, Tracer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as its only element."""
    now = [10.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def test_events_are_taken_once_and_in_order(clock: list[float]) -> None:
    tracer = Tracer(is_on=True)
    tracer.add("transfer", "expert 1/2", 1.0, 3.5, attempt=1)
    with tracer.span("phase", "verify", tokens=3) as arguments:
        clock[0] = 12.0
        arguments["late"] = "yes"
    assert tracer.take() == [
        TraceEvent("expert 1/2", "transfer", 1.0, 2.5, {"attempt": 1}),
        TraceEvent("verify", "phase", 10.0, 2.0, {"tokens": 3, "late": "yes"}),
    ]
    assert tracer.take() == []


def test_a_span_that_fails_is_told_too(clock: list[float]) -> None:
    tracer = Tracer(is_on=True)

    def fail() -> None:
        with tracer.span("layer", "experts"):
            clock[0] = 11.0
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert tracer.take() == [TraceEvent("experts", "layer", 10.0, 1.0, {})]


def test_nothing_is_kept_while_it_is_off() -> None:
    for tracer in (Tracer(), NO_TRACE):
        tracer.add("wait", "wait", 1.0, 2.0)
        with tracer.span("phase", "draft"):
            pass
        assert tracer.take() == []


def test_threads_lose_no_events_while_others_are_taken() -> None:
    tracer = Tracer(is_on=True)
    num_threads, num_events = 4, 500

    def add_all() -> None:
        for number in range(num_events):
            tracer.add("transfer", "expert", float(number), float(number))

    threads = [threading.Thread(target=add_all) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    taken = []
    while any(thread.is_alive() for thread in threads):
        taken += tracer.take()
    for thread in threads:
        thread.join()
    taken += tracer.take()
    assert len(taken) == num_threads * num_events
