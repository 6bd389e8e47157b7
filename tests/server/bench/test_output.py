"""What is told of a result: tables, JSON, pictures."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from server.bench.cell import Cell, CellRun
from server.bench.plots import write_plots
from server.bench.report import bench_json
from server.bench.results import BenchResult, CellResult
from server.bench.roofline import spread
from server.bench.tables import COLUMNS, print_result
from tests.server.bench.examples import (
    CYCLE,
    PACED,
    bench_result,
    changed,
    example_cell,
    example_result,
    mode_run,
    reply,
)


def small_result() -> BenchResult:
    """Two modes and a failed one: `auto` is three times as fast."""
    no_draft = changed(CYCLE, num_draft_tokens=0, num_accepted_tokens=0)
    runs = [
        mode_run("lru", reply(0.3, no_draft), reply(0.3, no_draft)),
        mode_run("auto", reply(0.1), reply(0.1)),
        mode_run("ngram", failure="The model needs 3 GB; pass --device-memory 3GB."),
    ]
    return bench_result(CellResult.of(CellRun(Cell(730_000_000, PACED), runs)))


def printed(result: BenchResult) -> list[str]:
    file = io.StringIO()
    print_result(result, Console(file=file, width=COLUMNS))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert "…" not in file.getvalue()
    return [" ".join(line.split()) for line in lines]


def test_tables_of_a_cell() -> None:
    lines = printed(small_result())
    heading = "Device memory 730 MB, paced link of 300.0 MB/s, each engine in a control group of 1400 MB"
    assert heading in lines
    for line in (
        "lru none 5 300 300 2.00 20 75% - - 3.00 900.0 MB",
        "auto auto 5 100 100 2.00 20 75% 4.0 50% 3.00 900.0 MB",
        "ngram - - failed - - - - - - - -",
        "auto 20.0 1.0 10.0 30.0 50% 400 32 8 8 66.7 1.50 1.00 2.00",
        "auto accepted, by position in the draft: 100% 100% 0%",
        "ngram failed: The model needs 3 GB; pass --device-memory 3GB.",
        "730 MB, paced link of 300.0 MB/s auto/lru 3.00 3.00 3.00 2",
        "auto/best fixed (lru) 3.00 3.00 3.00 2",
        "greedy replies with the tokens of lru 1 of 1",
        "- A reply has 16 tokens.",
    ):
        assert line in lines
    assert any(line.startswith("auto, the fastest here, is bound by the link") for line in lines)


def test_an_engine_without_counters_has_dashes() -> None:
    lines = printed(bench_result(example_cell(730_000_000, PACED, 0.35)))
    assert "accelerate - - 4382 4938 2.00 - - - - - 900.0 MB" in lines
    assert "accelerate - - - - - - - - - - - - -" in lines


def test_a_full_result_fits_the_width() -> None:
    assert len(printed(example_result())) > 100


def test_json() -> None:
    content = json.loads(bench_json(small_result()))
    assert content["command"] == "specter bench --quick"
    assert content["machine"] == {"device": "CPU (2 threads)"}
    lru, auto, ngram = content["cells"]
    assert set(lru) == set(auto) == set(ngram)
    assert [cell["mode"] for cell in content["cells"]] == ["lru", "auto", "ngram"]
    assert (auto["budget_bytes"], auto["link"], auto["bandwidth"]) == (730_000_000, "paced", 300e6)
    assert auto["tpot_median_seconds"] == pytest.approx(0.1)
    assert auto["tpot_over_floor"] == pytest.approx(1.5)
    assert auto["acceptance_by_position"][0] == {"num_judged": 4, "num_accepted": 4}
    assert auto["same_output"] == {"reference": "lru", "num_same": 1, "num_compared": 1}
    assert [reply["sampling"] for reply in auto["replies"]] == ["greedy", "sampled"]
    assert (ngram["failure"], ngram["tpot_median_seconds"]) == ("The model needs 3 GB; pass --device-memory 3GB.", None)
    ratio: dict[str, Any] = content["ratios"][0]
    assert (ratio["cell"], ratio["name"]) == ("730 MB, paced link of 300.0 MB/s", "auto/lru")
    assert [ratio["median"], ratio["low"], ratio["high"]] == pytest.approx([3.0, 3.0, 3.0])


def test_pictures_of_a_full_result(tmp_path: Path) -> None:
    paths = write_plots(example_result(), tmp_path)
    assert [path.name for path in paths] == ["tpot.png", "bytes.png", "acceptance.png", "roofline.png"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_only_what_there_is_is_drawn(tmp_path: Path) -> None:
    only_peer = CellResult.of(CellRun(Cell(10**9, PACED), [mode_run("accelerate", reply(1.0, changed(CYCLE)))]))
    uncounted = CellResult.of(
        CellRun(only_peer.cell, [mode_run("accelerate", reply(1.0, type(CYCLE)())), mode_run("lru", failure="no")])
    )
    assert [path.name for path in write_plots(bench_result(uncounted), tmp_path)] == ["tpot.png"]


def test_labels_keep_their_distance_and_stay_near_their_points() -> None:
    assert spread([0.1, 0.5], 0.1) == [0.1, 0.5]
    assert spread([0.5, 0.5, 0.5], 0.1) == pytest.approx([0.4, 0.5, 0.6])
    assert spread([], 0.1) == []
