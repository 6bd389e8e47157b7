import pytest

from server.console import startup_line


@pytest.mark.parametrize(
    ("stages", "line"),
    [
        ({"imports": 2.14, "dense weights": 0.01, "draft experts": 1.2}, ": imports 2.1 s, draft experts 1.2 s"),
        ({}, ""),
    ],
)
def test_stages_that_took_time_are_named(stages: dict[str, float], line: str) -> None:
    assert startup_line(5.64, stages) == f"Ready after 5.6 s{line}"
