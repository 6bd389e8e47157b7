import io

import pytest
from rich.console import Console

from engine.protocol import Loading
from server.console import LoadProgress


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=100, _environ={}), file


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [(100.0, 1), (101.0, 2), (106.0, 3), (107.0, 4), (107.5, 8), (108.0, 0)]
    times = iter([now for now, _ in steps])
    monkeypatch.setattr("server.console.time.monotonic", lambda: next(times))
    shown, file = console(terminal=False)
    with LoadProgress(shown) as progress:
        for _, done in steps[:-1]:
            progress(Loading("packing [layers]", done, 8))
        progress(Loading("downloading", 1_500_000, 0, "bytes"))
    assert file.getvalue().splitlines() == [
        "packing [layers]: 1 of 8",
        "packing [layers]: 3 of 8",
        "packing [layers]: 8 of 8",
        "downloading: 1.5 MB",
    ]


def test_bars_in_a_terminal() -> None:
    shown, file = console(terminal=True)
    with LoadProgress(shown) as progress:
        progress(Loading("packing [layers]", 1, 8))
        progress(Loading("packing [layers]", 8, 8))
        progress(Loading("reading", 0, 0))
    last_drawing = file.getvalue().rsplit("packing [layers]", 1)[1]
    assert "8 of 8" in last_drawing
    assert "reading" in last_drawing
