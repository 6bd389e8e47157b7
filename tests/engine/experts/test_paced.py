"""A slower link, by a clock of the test's own."""

import pytest
import torch

from engine.device import DoneEvent, Event
from engine.experts.layout import ExpertId
from engine.experts.paced import PacedStore

RATE = 8.0
"""Bytes per second; the records have 16."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


class SlowEvent(DoneEvent):
    """A copy that takes a while."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock = clock
        self.seconds = seconds
        self.is_waited_for = False

    def synchronize(self) -> None:
        self.is_waited_for = True
        self.clock.sleep(self.seconds)


class Store:
    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock = clock
        self.seconds = seconds
        self.fetched: list[ExpertId] = []
        self.offsets: list[int] = []
        self.events: list[SlowEvent] = []
        self.is_closed = False

    def is_divisible(self, expert: ExpertId) -> bool:
        return expert.expert != 7

    def fetch(self, expert: ExpertId, destination: torch.Tensor, offset: int = 0) -> Event:
        self.fetched.append(expert)
        self.offsets.append(offset)
        destination.fill_(expert.expert)
        self.events.append(SlowEvent(self.clock, self.seconds))
        return self.events[-1]

    def close(self) -> None:
        self.is_closed = True


def paced(rate: float | None, store_seconds: float = 0.0) -> tuple[PacedStore, Store, Clock]:
    clock = Clock()
    store = Store(clock, store_seconds)
    link = PacedStore(store, rate, clock, clock.sleep)
    link.is_on = True
    return link, store, clock


def fetch(link: PacedStore, number: int) -> Event:
    record = torch.zeros(16, dtype=torch.uint8)
    event = link.fetch(ExpertId(0, number), record)
    assert record.unique().tolist() == [number]
    return event


def test_transfers_come_at_the_rate_of_the_link() -> None:
    link, store, clock = paced(RATE)
    for number in (1, 2, 3):
        fetch(link, number).synchronize()
        assert clock.now == 100.0 + 2.0 * number
    assert store.fetched == [(0, 1), (0, 2), (0, 3)]


def test_a_link_that_was_idle_makes_up_for_nothing() -> None:
    link, _, clock = paced(RATE)
    fetch(link, 1)
    clock.now = 1000.0
    fetch(link, 2)
    assert clock.now == 1002.0


def test_a_transfer_waits_for_those_that_were_asked_for_before() -> None:
    """As where another thread's transfer is on the link: its time passes first."""
    link, store, clock = paced(RATE)
    arrivals: list[float] = []

    def sleep(seconds: float) -> None:
        if not arrivals:
            arrivals.append(0.0)
            fetch(link, 2)  # before the first has come
            arrivals.append(clock.now)
        clock.sleep(seconds)

    link._sleep = sleep
    fetch(link, 1)
    assert arrivals[1] == 104.0
    assert store.fetched == [(0, 1), (0, 2)]


def test_a_store_that_is_slower_sets_the_pace() -> None:
    link, _, clock = paced(RATE, store_seconds=5.0)
    fetch(link, 1)
    assert clock.now == 105.0
    faster, _, clock = paced(RATE, store_seconds=0.5)
    fetch(faster, 1)
    assert clock.now == 102.0


@pytest.mark.parametrize(("rate", "is_on"), [(None, True), (RATE, False)])
def test_without_a_rate_or_before_it_is_on_nothing_is_held_up(rate: float | None, is_on: bool) -> None:
    link, store, clock = paced(rate, store_seconds=5.0)
    link.is_on = is_on
    event = fetch(link, 1)
    assert clock.now == 100.0
    assert event is store.events[0]  # so others may wait for it as they would
    assert not store.events[0].is_waited_for


@pytest.mark.parametrize("is_on", [True, False])
def test_parts_take_their_share_of_the_time(is_on: bool) -> None:
    link, store, clock = paced(RATE)
    link.is_on = is_on
    record = torch.zeros(16, dtype=torch.uint8)
    for offset in (0, 4):
        link.fetch(ExpertId(0, 1), record[offset : offset + 4], offset)
    assert store.offsets == [0, 4]
    assert clock.now == 100.0 + (1.0 if is_on else 0.0)
    assert [link.is_divisible(ExpertId(0, expert)) for expert in (1, 7)] == [True, False]


def test_it_closes_the_store() -> None:
    link, store, _ = paced(RATE)
    link.close()
    assert store.is_closed
