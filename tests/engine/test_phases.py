import pytest

from engine.phases import PhaseClock


class Time:
    """A clock that moves only when told."""

    now = 1000.0

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr("time.perf_counter", lambda: time.now)
    return time


def test_a_phase_takes_the_time_of_its_block(time: Time) -> None:
    clock = PhaseClock()
    time.pass_seconds(100)
    with clock.phase("draft"):
        time.pass_seconds(2)
    time.pass_seconds(100)
    with clock.phase("draft"):
        time.pass_seconds(3)
    assert clock.seconds == {"draft": 5}


def test_an_inner_phase_is_no_part_of_the_outer_one(time: Time) -> None:
    clock = PhaseClock()
    with clock.phase("draft"):
        time.pass_seconds(1)
        with clock.phase("plan"):
            time.pass_seconds(10)
            with clock.phase("transfer"):
                time.pass_seconds(100)
            time.pass_seconds(20)
        time.pass_seconds(2)
    assert clock.seconds == {"draft": 3, "plan": 30, "transfer": 100}


def test_a_phase_may_be_within_itself(time: Time) -> None:
    clock = PhaseClock()
    with clock.phase("verify"):
        time.pass_seconds(1)
        with clock.phase("verify"):
            time.pass_seconds(2)
        time.pass_seconds(4)
    assert clock.seconds == {"verify": 7}


def test_an_error_ends_the_phase_and_its_time_counts(time: Time) -> None:
    clock = PhaseClock()

    def fail() -> None:
        with clock.phase("plan"):
            time.pass_seconds(1)
            raise KeyError

    with clock.phase("draft"):
        with pytest.raises(KeyError):
            fail()
        time.pass_seconds(2)
    time.pass_seconds(50)
    with clock.phase("verify"):
        time.pass_seconds(4)
    assert clock.seconds == {"draft": 2, "plan": 1, "verify": 4}


def test_a_phase_that_never_was_took_no_time() -> None:
    assert PhaseClock().seconds["draft"] == 0
