"""What keeps a cell's modes from being faster, in one sentence. Pure functions."""

from typing import NamedTuple

from server.bench.measures import Counters
from server.bench.results import CellResult, ModeResult


class Terms(NamedTuple):
    """Seconds per token. The link works beside the computation; waiting is what of it was not hidden."""

    link: float
    """For the bytes that were moved, at the link's bandwidth."""
    compute: float
    waiting: float

    @property
    def largest(self) -> str:
        """Its name; the link's where it is as large as another."""
        return max(self._fields, key=lambda name: float(getattr(self, name)))


def terms(counters: Counters, bandwidth: float | None) -> Terms:
    """With the bandwidth that was achieved where that of the link is not known."""
    bandwidth = bandwidth or counters.link_bandwidth
    return Terms(
        link=counters.bytes_per_token / bandwidth if bandwidth else 0.0,
        compute=counters.draft_seconds_per_token + counters.plan_seconds_per_token + counters.verify_seconds_per_token,
        waiting=counters.wait_seconds_per_token,
    )


def what_bounds(result: CellResult) -> str | None:
    """A sentence about the fastest mode whose time is known in parts; None where there is none."""
    known = [mode for mode in result.modes if _counters(mode) and _tpot(mode)]
    fastest = min(known, key=lambda mode: _tpot(mode) or 0, default=None)
    if fastest is None or not (counters := _counters(fastest)):
        return None
    parts = terms(counters, result.cell.link.bandwidth)
    bound = {"link": "the link", "compute": "computation", "waiting": "waiting for experts"}[parts.largest]
    return (
        f"{fastest.mode.name}, the fastest here, is bound by {bound}: per token {1e3 * parts.link:.0f} ms of link, "
        f"{1e3 * parts.compute:.0f} ms of computation, {1e3 * parts.waiting:.0f} ms of waiting."
    )


def _counters(mode: ModeResult) -> Counters | None:
    return mode.measures.counters if mode.measures else None


def _tpot(mode: ModeResult) -> float | None:
    return mode.measures.tpot_median_seconds if mode.measures else None
