"""What a bench has found, for whoever shows it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.protocol import TraceEvent
from server.bench.cell import Cell, CellRun, ModeRun
from server.bench.measures import Measures, measure
from server.bench.modes import REFERENCE, Mode
from server.bench.ratios import Ratio, Sameness, ratios, sameness


@dataclass(frozen=True)
class ModeResult:
    run: ModeRun
    measures: Measures | None
    """None where there is no reply."""
    sameness: Sameness | None
    """None for the reference."""

    @property
    def mode(self) -> Mode:
        return self.run.mode


@dataclass(frozen=True)
class CellResult:
    cell: Cell
    modes: list[ModeResult]
    ratios: list[Ratio]

    @classmethod
    def of(cls, run: CellRun) -> "CellResult":
        same = sameness(run, REFERENCE)
        modes = [
            ModeResult(
                mode_run,
                measure(list(mode_run.replies.values()), run.cell.link.bandwidth) if mode_run.replies else None,
                same.get(mode_run.mode.name),
            )
            for mode_run in run.modes
        ]
        return cls(run.cell, modes, ratios(run))


@dataclass(frozen=True)
class BenchResult:
    command: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    """How long replies are, and the like."""
    notes: Sequence[str]
    """What was decided or could not be done, one sentence each."""
    cells: Sequence[CellResult]
    traces: dict[str, list[TraceEvent]]
    """By mode, in the last cell; empty where none was asked for."""
