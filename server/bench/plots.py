"""Pictures of a result. Importing this module imports matplotlib, which is an optional dependency.

Colours are those of Okabe and Ito, which people with any colour vision can tell apart; modes differ in their markers
and hatches too.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from server.bench.links import Link
from server.bench.measures import Counters, Position
from server.bench.modes import DEFAULT
from server.bench.results import BenchResult, CellResult, ModeResult
from server.bench.roofline import draw_roofline
from server.formats import megabytes

DPI = 130
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
COLOURS = ("#999999", "#56B4E9", "#0072B2", "#E69F00", "#D55E00", "#CC79A7", "#009E73", "#000000", "#F0E442")
HATCHES = ("", "//", "", "\\\\", "", "xx", "", "..", "--")
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "*", "X", "<")
STYLES = (COLOURS, HATCHES, MARKERS, LINES)
LOG_FROM = 12.0
"""Ratio of the largest and the smallest value from which on an axis is logarithmic."""
MIN_SHARES = 6
"""A bar is no wider than one of so many in a group."""
MIN_JUDGED = 3
"""Tokens at a position, below which its acceptance rate says nothing."""


class Style(NamedTuple):
    colour: str
    hatch: str
    marker: str
    line: str


def _styles(cells: Sequence[CellResult]) -> dict[str, Style]:
    """By mode, in the order of the results; the default modes always look the same."""
    names = list(dict.fromkeys(mode.mode.name for cell in cells for mode in cell.modes))
    places = {name: i for i, name in enumerate(dict.fromkeys((*DEFAULT, *names)))}
    return {name: Style(*(kinds[places[name] % len(kinds)] for kinds in STYLES)) for name in names}


class Bar(NamedTuple):
    value: float
    low: float
    high: float


BarOf = Callable[[ModeResult], Bar | None]


def write_plots(result: BenchResult, directory: Path) -> list[Path]:
    """Write the PNG files that there is something to draw in, and return their paths."""
    styles = _styles(result.cells)
    written = []
    with mpl.rc_context(STYLE):
        for name, draw in (("tpot", _tpot), ("bytes", _bytes), ("acceptance", _acceptance), ("roofline", _roofline)):
            if figure := draw(result.cells, styles):
                FigureCanvasAgg(figure)
                path = directory / f"{name}.png"
                figure.savefig(path, dpi=DPI)
                written.append(path)
    return written


def _tpot(cells: Sequence[CellResult], styles: dict[str, Style]) -> Figure | None:
    links = _links(cells)
    figure, axes = _figure(len(links), 1, width=9.0, height=3.3)
    drawn = False
    for ax, link in zip(axes, links, strict=True):
        bars = _bars(cells, link, styles, _tpot_bar)
        drawn |= _draw_bars(ax, bars, cells, link, styles)
        ax.set_ylabel("TPOT, ms per token")
        ax.set_title(f"{link}", loc="left")
    if not drawn:
        return None
    axes[-1].set_xlabel("device memory")
    _finish(figure, axes[0], "Time per output token: median, and the fastest and slowest reply")
    return figure


def _bytes(cells: Sequence[CellResult], styles: dict[str, Style]) -> Figure | None:
    links = _links(cells)
    figure, axes = _figure(2, len(links), width=max(8.0, 5.0 * len(links)), height=2.9)
    drawn = False
    for column, link in enumerate(links):
        moved, hits = axes[column], axes[len(links) + column]
        drawn |= _draw_bars(moved, _bars(cells, link, styles, _bytes_bar), cells, link, styles)
        moved.set_title(f"{link}", loc="left")
        _draw_bars(hits, _bars(cells, link, styles, _hits_bar), cells, link, styles)
        hits.set_yscale("linear")  # whatever the bars' heights
        hits.set_ylim(0, 1)
        hits.yaxis.set_major_formatter(PercentFormatter(1.0))
        hits.set_xlabel("device memory")
        if column == 0:
            moved.set_ylabel("moved, MB per token")
            hits.set_ylabel("hit rate")
    if not drawn:
        return None
    _finish(figure, axes[0], "Expert bytes that a token moves, and visits to experts that were resident")
    return figure


def _acceptance(cells: Sequence[CellResult], styles: dict[str, Style]) -> Figure | None:
    figure, (ax,) = _figure(1, 1, width=7.0, height=4.0)
    longest = 0
    for name, style in styles.items():
        if rates := [one.rate for one in _positions(cells, name) if one.num_judged >= MIN_JUDGED]:
            longest = max(longest, len(rates))
            positions = range(1, len(rates) + 1)
            ax.plot(positions, rates, color=style.colour, marker=style.marker, linestyle=style.line, label=name)
    if not longest:
        return None
    ax.set_xlabel(f"position in the draft (those judged at least {MIN_JUDGED} times)")
    ax.set_ylabel("accepted, if all before it were")
    ax.set_xlim(0.5, longest + 0.5)
    ax.set_ylim(0, 1.05)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16, steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.grid(alpha=0.3)
    _finish(figure, ax, "Acceptance of drafted tokens, over all cells")
    return figure


def _roofline(cells: Sequence[CellResult], styles: dict[str, Style]) -> Figure | None:
    links = _links(cells)
    budgets = _budgets(cells)
    figure, axes = _figure(len(links), len(budgets), width=max(7.0, 4.6 * len(budgets)), height=4.0)
    drawn = False
    for ax, (link, budget) in zip(axes, ((link, budget) for link in links for budget in budgets), strict=True):
        cell = next((one for one in cells if (one.cell.link, one.cell.budget_bytes) == (link, budget)), None)
        markers = {name: (style.colour, style.marker) for name, style in styles.items()}
        drawn |= cell is not None and draw_roofline(ax, cell, markers)
        ax.set_title(f"{megabytes(budget)}, {link}", loc="left")
    if not drawn:
        return None
    figure.suptitle(
        "Throughput against the bytes that a token moves, and each mode's mean draft length", x=0.01, ha="left"
    )
    return figure


def _figure(num_rows: int, num_columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """`height` is that of a row; the axes row by row."""
    figure = Figure(figsize=(width, height * num_rows + 0.7), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False)
    return figure, [ax for row in axes for ax in row]


def _finish(figure: Figure, ax: Axes, title: str) -> None:
    handles, labels = ax.get_legend_handles_labels()
    figure.suptitle(title, x=0.01, ha="left")
    figure.legend(handles, labels, loc="outside right upper", frameon=False)


def _bars(
    cells: Sequence[CellResult], link: Link, styles: dict[str, Style], bar_of: BarOf
) -> dict[str, list[Bar | None]]:
    """By mode, one per budget; modes without any are left out."""
    bars: dict[str, list[Bar | None]] = {}
    for name in styles:
        found = [_bar(cells, link, budget, name, bar_of) for budget in _budgets(cells)]
        if any(found):
            bars[name] = found
    return bars


def _bar(cells: Sequence[CellResult], link: Link, budget: int, name: str, bar_of: BarOf) -> Bar | None:
    for cell in cells:
        if (cell.cell.link, cell.cell.budget_bytes) == (link, budget):
            return next((bar_of(mode) for mode in cell.modes if mode.mode.name == name), None)
    return None


def _draw_bars(
    ax: Axes, bars: dict[str, list[Bar | None]], cells: Sequence[CellResult], link: Link, styles: dict[str, Style]
) -> bool:
    """Groups of bars, a group per budget; whether there are any."""
    budgets = _budgets(cells)
    width = 0.84 / max(MIN_SHARES, len(bars))
    for i, (name, row) in enumerate(bars.items()):
        placed = [(group + (i - (len(bars) - 1) / 2) * width, bar) for group, bar in enumerate(row) if bar]
        style = styles[name]
        ax.bar(
            [x for x, _ in placed],
            [bar.value for _, bar in placed],
            width=0.92 * width,
            yerr=[[bar.value - bar.low for _, bar in placed], [bar.high - bar.value for _, bar in placed]],
            color=style.colour,
            hatch=style.hatch,
            edgecolor="white",
            error_kw={"elinewidth": 0.9, "ecolor": "#222222"},
            label=name,
        )
    ax.set_xticks(range(len(budgets)), [megabytes(budget) for budget in budgets])
    ax.grid(axis="y", alpha=0.3)
    values = [bar.value for row in bars.values() for bar in row if bar and bar.value > 0]
    if values and max(values) > LOG_FROM * min(values):
        ax.set_yscale("log")
        ax.set_ylim(bottom=min(values) / 2)
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    return bool(values)


def _tpot_bar(mode: ModeResult) -> Bar | None:
    measures = mode.measures
    if measures is None or measures.tpot_median_seconds is None:
        return None
    low, high = measures.tpot_low_seconds or 0.0, measures.tpot_high_seconds or 0.0
    return Bar(1e3 * measures.tpot_median_seconds, 1e3 * low, 1e3 * high)


def _bytes_bar(mode: ModeResult) -> Bar | None:
    counters = _counters(mode)
    return _plain_bar(counters.bytes_per_token / 1e6) if counters else None


def _hits_bar(mode: ModeResult) -> Bar | None:
    counters = _counters(mode)
    return _plain_bar(counters.hit_rate) if counters and counters.hit_rate is not None else None


def _plain_bar(value: float) -> Bar:
    return Bar(value, value, value)


def _counters(mode: ModeResult) -> Counters | None:
    return mode.measures.counters if mode.measures else None


def _positions(cells: Sequence[CellResult], name: str) -> list[Position]:
    """Of the mode in all cells together."""
    sums: list[Position] = []
    for counters in _of_mode(cells, name):
        for i, position in enumerate(counters.acceptance_by_position):
            if i == len(sums):
                sums.append(Position(0, 0))
            sums[i] = Position(sums[i].num_judged + position.num_judged, sums[i].num_accepted + position.num_accepted)
    return sums


def _of_mode(cells: Sequence[CellResult], name: str) -> Iterator[Counters]:
    for cell in cells:
        for mode in cell.modes:
            if mode.mode.name == name and (counters := _counters(mode)):
                yield counters


def _links(cells: Sequence[CellResult]) -> list[Link]:
    return list(dict.fromkeys(cell.cell.link for cell in cells))


def _budgets(cells: Sequence[CellResult]) -> list[int]:
    return list(dict.fromkeys(cell.cell.budget_bytes for cell in cells))
