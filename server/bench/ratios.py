"""Modes against each other, by TPOTs of the same prompt, sampling and round: so the machine's other work counts little.

Pure functions.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from server.bench.cell import CellRun, ModeRun
from server.bench.modes import Mode
from server.bench.reply import Reply
from server.bench.schedule import Step

BASELINES = ("on-demand", "lru", "accelerate")
"""What the others are compared with; none of them is compared with a slower one but `lru` with `on-demand`."""
AGAINST_PEER = ("auto", "specter")


class Ratio(msgspec.Struct, frozen=True):
    """The baseline's TPOT over ours: above 1, ours is faster."""

    name: str
    """Such as "auto/lru"."""
    ours: str
    baseline: str
    median: float
    low: float
    high: float
    num_pairs: int


class Sameness(msgspec.Struct, frozen=True):
    """Greedy replies that have the reference's tokens, as far as both go."""

    reference: str
    num_same: int
    num_compared: int


class _Pair(NamedTuple):
    name: str
    ours: ModeRun
    baseline: ModeRun


def ratios(run: CellRun) -> list[Ratio]:
    """Of a cell: all pairs of modes that have replies to the same."""
    found = []
    for name, ours, baseline in _pairs(run.modes):
        if speedups := _speedups(ours.replies, baseline.replies):
            found.append(
                Ratio(
                    name=name,
                    ours=ours.mode.name,
                    baseline=baseline.mode.name,
                    median=statistics.median(speedups),
                    low=min(speedups),
                    high=max(speedups),
                    num_pairs=len(speedups),
                )
            )
    return found


def sameness(run: CellRun, reference: str) -> dict[str, Sameness]:
    """By mode, without the reference: `reference`, or else the first mode that has replies."""
    replying = [mode_run for mode_run in run.modes if mode_run.replies]
    if not replying:
        return {}
    chosen = next((mode_run for mode_run in replying if mode_run.mode.name == reference), replying[0])
    return {
        other.mode.name: _compare(other.replies, chosen.replies, chosen.mode)
        for other in replying
        if other is not chosen
    }


def median_tpot(replies: Mapping[Step, Reply]) -> float | None:
    tpots = [tpot for reply in replies.values() if (tpot := reply.tpot_seconds) is not None]
    return statistics.median(tpots) if tpots else None


def _pairs(runs: Sequence[ModeRun]) -> Iterator[_Pair]:
    modes = {run.mode.name: run for run in runs}
    ours = [run for name, run in modes.items() if name not in BASELINES]

    def against(baseline: str, names: Sequence[str]) -> Iterator[_Pair]:
        if baseline in modes:
            yield from (_Pair(f"{name}/{baseline}", modes[name], modes[baseline]) for name in names if name in modes)

    yield from against("lru", [run.mode.name for run in ours])
    yield from against("on-demand", ["lru"])
    yield from against("accelerate", AGAINST_PEER)
    fixed = [(tpot, run) for run in runs if _is_fixed(run) and (tpot := median_tpot(run.replies)) is not None]
    if fixed and "auto" in modes:
        _, best = min(fixed, key=lambda pair: pair[0])
        yield _Pair("auto/best fixed", modes["auto"], best)


def _is_fixed(run: ModeRun) -> bool:
    """Whether it is a choice that "auto" had too."""
    return run.mode.name not in ("auto", "on-demand") and not run.mode.is_peer


def _speedups(ours: Mapping[Step, Reply], baseline: Mapping[Step, Reply]) -> list[float]:
    both = [(reply.tpot_seconds, baseline[step].tpot_seconds) for step, reply in ours.items() if step in baseline]
    return [slow / fast for fast, slow in both if fast and slow]


def _compare(replies: Mapping[Step, Reply], reference: Mapping[Step, Reply], mode: Mode) -> Sameness:
    compared = [step for step in replies if step.sampling == "greedy" and step in reference]
    same = [step for step in compared if _is_same(replies[step].token_ids, reference[step].token_ids)]
    return Sameness(mode.name, len(same), len(compared))


def _is_same(first: Sequence[int], second: Sequence[int]) -> bool:
    length = min(len(first), len(second))
    return list(first[:length]) == list(second[:length])
