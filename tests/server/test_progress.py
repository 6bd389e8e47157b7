import io
import re

import pytest
from rich.console import Console

from engine.protocol import Loading
from server.formats import duration
from server.progress import LoadProgress


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=100, _environ={}), file


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [(100.0, 1), (101.0, 2), (106.0, 3), (107.0, 4), (107.5, 8), (108.0, 0)]
    times = iter([now for now, _ in steps])
    monkeypatch.setattr("server.progress.time.monotonic", lambda: next(times))
    shown, file = console(terminal=False)
    with LoadProgress(shown) as progress:
        for _, done in steps[:-1]:
            progress(Loading("packing [layers]", done, 8))
        progress(Loading("downloading", 1_500_000, 0, "bytes"))
    assert file.getvalue().splitlines() == [
        "packing [layers]: 1 of 8",
        "packing [layers]: 3 of 8, about 15 s left",
        "packing [layers]: 8 of 8",
        "downloading: 1.5 MB",
    ]


def test_time_left_is_by_the_rate_of_this_stage_and_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stage resumes at 40 of 48, and takes 200 seconds for each of the rest."""
    steps = [(0.0, "fast", 1), (10.0, "fast", 2), (20.0, "slow", 40), (220.0, "slow", 41), (420.0, "slow", 42)]
    times = iter([now for now, _, _ in steps])
    monkeypatch.setattr("server.progress.time.monotonic", lambda: next(times))
    shown, file = console(terminal=False)
    progress = LoadProgress(shown)
    for _, stage, done in steps:
        progress(Loading(stage, done, 48))
    assert file.getvalue().splitlines()[2:] == [
        "slow: 40 of 48",
        "slow: 41 of 48, about 23 min left",
        "slow: 42 of 48, about 20 min left",
    ]


def test_durations() -> None:
    shown = {0.2: "1 s", 59.0: "59 s", 89.0: "1 min", 3570.0: "1 h 0 min", 4800.0: "1 h 20 min"}
    assert {seconds: duration(seconds) for seconds in shown} == shown


def test_bars_in_a_terminal() -> None:
    shown, file = console(terminal=True)
    with LoadProgress(shown) as progress:
        for done in (1, 2, 8):
            progress(Loading("packing [layers]", done, 8))
        progress(Loading("reading", 0, 0))
    last_drawing = file.getvalue().rsplit("packing [layers]", 1)[1]
    # The time that has passed, and the time left.
    assert re.search(r"8 of 8.*0:00:00.*0:00:00", last_drawing)
    assert "reading" in last_drawing
