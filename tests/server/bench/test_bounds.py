from server.bench.bounds import Terms, what_bounds
from server.bench.cell import Cell, CellRun
from server.bench.links import Link
from server.bench.results import CellResult
from tests.server.bench.examples import CYCLE, PACED, changed, mode_run, reply


def sentence(link: Link, *, wait_seconds: float = 0.03) -> str | None:
    cycle = changed(CYCLE, transfer_wait_seconds=wait_seconds)
    runs = [mode_run("lru", reply(0.9)), mode_run("auto", reply(0.1, cycle, cycle)), mode_run("ngram", failure="no")]
    return what_bounds(CellResult.of(CellRun(Cell(10**9, link), runs)))


def test_the_largest_term_of_the_fastest_mode() -> None:
    assert sentence(PACED) == (
        "auto, the fastest here, is bound by the link: per token 67 ms of link, 51 ms of computation, 10 ms of waiting."
    )
    assert "bound by computation: per token 20 ms of link" in (sentence(Link("real", None, 1e9)) or "")
    assert "bound by waiting for experts" in (sentence(PACED, wait_seconds=0.6) or "")


def test_a_link_of_unknown_bandwidth_counts_as_fast_as_it_was() -> None:
    assert "per token 50 ms of link" in (sentence(Link("real", None, None)) or "")


def test_nothing_to_say() -> None:
    assert what_bounds(CellResult.of(CellRun(Cell(1, PACED), [mode_run("lru", failure="no")]))) is None
    assert Terms(link=1.0, compute=1.0, waiting=0.5).largest == "link"
