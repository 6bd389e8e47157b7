"""What drafting the next window while verification waits for experts could gain, at best. Not in the engine.

    python -m benchmarks.overlap [--model NAME] [--profile FILE] [--budgets SIZES] [--links SIZES] [--json FILE]

Wherever verification waits, the draft goes on behind the window. If the whole window is accepted, and the draft has
guessed the bonus token, then the next cycle has these passes already. Passes for nothing cost no more than that an
arrival waits for the one that is under way: the engine would have to roll back the KV cache too, and would have to run
these passes in the midst of another one, where its waits are. A few percent are not worth a step loop that no longer
reads draft, plan, transfer, verify. The governor's cells say least: cheaper drafts change all that it decides.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import recorded
from benchmarks.scenarios import Situation, scenario_of
from engine.errors import SpecterError
from engine.process import quiet_libraries
from engine.profile import ProfiledToken
from engine.simulation import Decoding, Hardware, Shape, Simulation

MODES = ("specter", "specter-4", "specter-8")


class OverlappingSimulation(Simulation):
    """Drafts behind the window while verification waits."""

    def __init__(self, shape: Shape, hardware: Hardware, decoding: Decoding) -> None:
        super().__init__(shape, hardware, decoding)
        self._num_ahead = 0
        """Passes of the next cycle that are done already."""
        self._max_ahead = 0

    def _cycle(self, text: Sequence[ProfiledToken], position: int) -> tuple[int, int]:
        num_drafted, num_taken = super()._cycle(text, position)
        # The bonus token, or the one that was rejected.
        last = position + num_taken
        if last == len(text) or not text[last].is_drafted:
            self._num_ahead = 0
        return num_drafted, num_taken

    def _draft(self, text: Sequence[ProfiledToken], position: int) -> list[float]:
        confidences = super()._draft(text, position)
        # More than are wanted now are forgotten.
        self._num_ahead = 0
        behind = len(text) - position - 1 - len(confidences)
        control = self._decoding.control
        self._max_ahead = min(control.max_length, behind) if control is not None and confidences else 0
        return confidences

    def _draft_pass(self) -> None:
        if self._num_ahead:
            self._num_ahead -= 1
        else:
            super()._draft_pass()

    def _wait(self) -> None:
        if self._num_ahead >= self._max_ahead:
            super()._wait()
            return
        started = self._now
        self._compute(self._hardware.draft_seconds)
        self._num_ahead += 1
        self._wait_seconds += self._now - started


def gains(found: Situation) -> Iterator[dict[str, Any]]:
    """By mode, for those that fit."""
    for mode in MODES:
        seconds = []
        for simulation in (Simulation, OverlappingSimulation):
            chosen = scenario_of(found, mode)
            if chosen is None:
                break
            run = simulation(*chosen).run(found.profile.tokens, found.warm_up_tokens)
            seconds.append(run.tpot_seconds)
        else:
            in_turn, overlapped = seconds
            yield {
                "mode": mode,
                "tpot_seconds": in_turn,
                "overlapped_tpot_seconds": overlapped,
                "gain": in_turn / overlapped - 1,
            }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    recorded.add_arguments(parser)
    recorded.add_cells(parser)
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    arguments = parser.parse_args()
    quiet_libraries()
    try:
        found = recorded.situation(arguments)
        rows = [
            {"budget_bytes": budget, "bandwidth": link, **gain}
            for budget in arguments.budgets or recorded.budgets(found)
            for link in arguments.links or recorded.links(found)
            for gain in gains(recorded.with_cell(found, budget, link))
        ]
    except SpecterError as error:
        sys.exit(str(error))
    table = Table("budget MB", "link MB/s", "mode", "in turn ms", "overlapped ms", "gain")
    for row in rows:
        table.add_row(
            f"{row['budget_bytes'] / 1e6:.0f}",
            f"{row['bandwidth'] / 1e6:.0f}",
            row["mode"],
            f"{row['tpot_seconds'] * 1e3:.0f}",
            f"{row['overlapped_tpot_seconds'] * 1e3:.0f}",
            f"{row['gain']:+.1%}",
        )
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
