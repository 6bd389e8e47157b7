"""One cell as a roofline: throughput against the bytes that a token moves, under the roofs of link and computation.

After Williams et al. 2009 ("Roofline"), with bytes per token where that has operations per byte.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from server.bench.results import CellResult

ROOM = 3.0
"""By which factor the axes go beyond the points."""
ROOF = "#444444"
LABEL_HEIGHT = 0.062
"""Of a line of text, as a share of the axes' height."""


class Point(NamedTuple):
    mode: str
    megabytes_per_token: float
    tokens_per_second: float
    mean_draft_length: float

    @property
    def label(self) -> str:
        return f"{self.mode} ({self.mean_draft_length:.1f})" if self.mean_draft_length else self.mode


def draw_roofline(ax: Axes, cell: CellResult, markers: Mapping[str, tuple[str, str]]) -> bool:
    """`markers` has a colour and a marker by mode. Returns whether there is any point."""
    points = _points(cell)
    if not points:
        return False
    fastest = _token_compute_seconds(cell)
    compute = 1 / fastest if fastest else None
    xs, ys = [point.megabytes_per_token for point in points], [point.tokens_per_second for point in points]
    left, right = min(xs) / ROOM, max(xs) * ROOM**2
    bottom, top = min(ys) / ROOM, max(*ys, compute or 0.0) * ROOM
    ax.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top))
    if compute:
        label = "one token a pass, all experts resident"
        ax.plot([left, right], [compute, compute], color=ROOF, linestyle="--", linewidth=1)
        ax.annotate(label, (right, compute), (-2, 3), textcoords="offset points", ha="right", fontsize=7, color=ROOF)
    if bandwidth := cell.cell.link.bandwidth:
        ax.plot([left, right], [bandwidth / 1e6 / left, bandwidth / 1e6 / right], color=ROOF, linewidth=1)
        x = left * ROOM**0.5
        if bottom < (y := bandwidth / 1e6 / x) < top:
            ax.annotate("link", (x, y), (4, 4), textcoords="offset points", fontsize=7, color=ROOF)
    for point in points:
        colour, marker = markers[point.mode]
        ax.plot(
            point.megabytes_per_token,
            point.tokens_per_second,
            color=colour,
            marker=marker,
            markersize=8,
            markeredgecolor="white",
            markeredgewidth=0.4,
            linestyle="none",
            zorder=3,
        )
    _label(ax, points, markers)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    ax.set_xlabel("moved, MB per token")
    ax.set_ylabel("tokens per second")
    ax.grid(alpha=0.25)
    return True


def _token_compute_seconds(cell: CellResult) -> float | None:
    """Of the engine that measured the shortest; None where none has measured it, as those of others do not."""
    measured = [mode.run.capabilities.token_compute_seconds for mode in cell.modes if mode.run.capabilities]
    return min((seconds for seconds in measured if seconds), default=None)


def _points(cell: CellResult) -> list[Point]:
    return [
        Point(mode.mode.name, counters.bytes_per_token / 1e6, 1 / tpot, counters.mean_draft_length)
        for mode in cell.modes
        if mode.measures and (counters := mode.measures.counters) and (tpot := mode.measures.tpot_median_seconds)
        if counters.bytes_per_token
    ]


def _label(ax: Axes, points: Sequence[Point], markers: Mapping[str, tuple[str, str]]) -> None:
    """At the right edge, from bottom to top in the order of the points, each with a line to its own."""
    to_axes = ax.transData + ax.transAxes.inverted()
    ordered = sorted(points, key=lambda point: point.tokens_per_second)
    wanted = [float(to_axes.transform((p.megabytes_per_token, p.tokens_per_second))[1]) for p in ordered]
    for point, height in zip(ordered, spread(wanted, LABEL_HEIGHT), strict=True):
        ax.annotate(
            point.label,
            (point.megabytes_per_token, point.tokens_per_second),
            (0.72, height),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
            arrowprops={"arrowstyle": "-", "color": markers[point.mode][0], "linewidth": 0.7, "shrinkB": 4},
        )


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Ascending positions that are near the wanted ones, and at least a gap apart."""
    placed: list[float] = []
    for position in wanted:
        placed.append(max(position, placed[-1] + gap) if placed else position)
    # What was pushed up only goes back by half of the mean push, so that a crowd stays around its middle.
    push = sum(after - before for after, before in zip(placed, wanted, strict=True)) / max(1, len(placed))
    return [position - push for position in placed]
