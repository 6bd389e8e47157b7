"""What a bench prints: two tables per cell, what bounds it, and the ratios. Everything fits 120 columns."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.bench.bounds import what_bounds
from server.bench.measures import Counters
from server.bench.results import BenchResult, CellResult, ModeResult
from server.formats import megabytes, size

COLUMNS = 120
UNKNOWN = "-"
MAX_POSITIONS = 8


class Column(NamedTuple):
    title: str
    value: Callable[[ModeResult], str]


def print_result(result: BenchResult, console: Console) -> None:
    for cell in result.cells:
        print_cell(cell, console)
    console.print(Text("\nTPOT of the second over the first's, prompt by prompt: above 1, the first is faster"))
    console.print(_ratio_table(result.cells))
    for note in result.notes:
        console.print(Text(f"- {note}"))


def print_cell(cell: CellResult, console: Console) -> None:
    limits = {mode.run.limit_bytes for mode in cell.modes} - {None}
    group = f", each engine in a control group of {megabytes(max(filter(None, limits)))}" if limits else ""
    console.print(Text(f"\nDevice memory {cell.cell}{group}", style="bold"))
    console.print(_table(SPEED, cell.modes))
    console.print(_table(TERMS, cell.modes))
    for mode in cell.modes:
        if mode.run.failure is not None:
            console.print(Text(f"{mode.mode.name} failed: {mode.run.failure}"))
        if acceptance := _acceptance_by_position(mode):
            console.print(Text(f"{mode.mode.name} accepted, by position in the draft: {acceptance}"))
    if sentence := what_bounds(cell):
        console.print(Text(sentence))


def _table(columns: Sequence[Column], modes: Sequence[ModeResult]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("mode", no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for mode in modes:
        table.add_row(mode.mode.name, *(column.value(mode) for column in columns))
    return table


def _ratio_table(cells: Sequence[CellResult]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("cell", "ratio"):
        table.add_column(title)
    for title in ("median", "lowest", "highest", "pairs"):
        table.add_column(title, justify="right", no_wrap=True)
    for cell in cells:
        # Once, at its first row.
        cell_name = iter([str(cell.cell)])
        for ratio in cell.ratios:
            name = f"{ratio.name} ({ratio.baseline})" if ratio.name.endswith("fixed") else ratio.name
            numbers = (f"{value:.2f}" for value in (ratio.median, ratio.low, ratio.high))
            table.add_row(next(cell_name, ""), name, *numbers, str(ratio.num_pairs))
        same = [mode.sameness for mode in cell.modes if mode.sameness]
        if compared := sum(one.num_compared for one in same):
            reference = same[0].reference
            share = f"{sum(one.num_same for one in same)} of {compared}"
            table.add_row(next(cell_name, ""), f"greedy replies with the tokens of {reference}", share, "", "", "")
        table.add_section()
    return table


def _tpot(mode: ModeResult) -> str:
    if mode.run.failure is not None:
        return "failed"
    return _ms(mode.measures.tpot_median_seconds) if mode.measures else UNKNOWN


def _counted(show: Callable[[Counters], str]) -> Callable[[ModeResult], str]:
    """Of engines that count."""
    return lambda mode: show(mode.measures.counters) if mode.measures and mode.measures.counters else UNKNOWN


def _ms(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def _seconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{seconds:.2f}"


def _megabytes(num_bytes: float | None) -> str:
    return UNKNOWN if num_bytes is None else f"{num_bytes / 1e6:.0f}" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2g}"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.0f}%"


def _factor(factor: float | None) -> str:
    return UNKNOWN if factor is None else f"{factor:.2f}"


def _size(num_bytes: int | None) -> str:
    return UNKNOWN if num_bytes is None else size(num_bytes)


def _slots(mode: ModeResult) -> str:
    # A peer has no slots; its plan is made up.
    return str(mode.run.capabilities.plan.num_slots) if mode.run.capabilities and not mode.mode.is_peer else UNKNOWN


def _drafter(mode: ModeResult) -> str:
    return mode.run.capabilities.drafter if mode.run.capabilities and not mode.mode.is_peer else UNKNOWN


def _drafted(show: Callable[[Counters], str]) -> Callable[[ModeResult], str]:
    """Of engines that draft."""
    return _counted(lambda counters: show(counters) if counters.mean_draft_length else UNKNOWN)


def _acceptance_by_position(mode: ModeResult) -> str:
    """Of the first positions; a later one is seldom judged."""
    if mode.measures is None or mode.measures.counters is None:
        return ""
    return " ".join(_percent(one.rate) for one in mode.measures.counters.acceptance_by_position[:MAX_POSITIONS])


SPEED = (
    Column("drafter", _drafter),
    Column("slots", _slots),
    Column("TPOT\nms", _tpot),
    Column("p90\nms", lambda mode: _ms(mode.measures.tpot_p90_seconds) if mode.measures else UNKNOWN),
    Column("TTFT\ns", lambda mode: _seconds(mode.measures.ttft_median_seconds) if mode.measures else UNKNOWN),
    Column("MB per\ntoken", _counted(lambda counters: _megabytes(counters.bytes_per_token))),
    Column("hits", _counted(lambda counters: _percent(counters.hit_rate))),
    Column("drafted\nper cycle", _drafted(lambda counters: f"{counters.mean_draft_length:.1f}")),
    Column("accepted", _drafted(lambda counters: _percent(counters.acceptance_rate))),
    Column("tokens\nper cycle", _counted(lambda counters: f"{counters.tokens_per_cycle:.2f}")),
    Column("peak\nRSS", lambda mode: _size(mode.run.peak_rss_bytes)),
)
TERMS = (
    Column("draft\nms", _counted(lambda counters: _ms(counters.draft_seconds_per_token))),
    Column("plan\nms", _counted(lambda counters: _ms(counters.plan_seconds_per_token))),
    Column("wait\nms", _counted(lambda counters: _ms(counters.wait_seconds_per_token))),
    Column("verify\nms", _counted(lambda counters: _ms(counters.verify_seconds_per_token))),
    Column("link\nbusy", _counted(lambda counters: _percent(counters.link_utilisation))),
    Column("link\nMB/s", _counted(lambda counters: _megabytes(counters.link_bandwidth))),
    Column("prefetches\nused", _counted(lambda counters: str(counters.num_prefetches_used))),
    Column("and\nwasted", _counted(lambda counters: str(counters.num_prefetches_wasted))),
    Column("demand\nfetches", _counted(lambda counters: str(counters.num_demand_fetches))),
    Column("TPOT\nfloor ms", _counted(lambda counters: _ms(counters.floor_seconds))),
    Column("TPOT\nover it", _counted(lambda counters: _factor(counters.tpot_over_floor))),
    Column("TTFT\nfloor s", _counted(lambda counters: _seconds(counters.ttft_floor_seconds))),
    Column("TTFT\nover it", _counted(lambda counters: _factor(counters.ttft_over_floor))),
)
