"""What a token would take on machines that are not here: routes replayed in virtual time by `engine.simulation`.

    python -m benchmarks.simulate [--model NAME] [--budgets SIZES] [--links SIZES] [--json FILE]
    python -m benchmarks.simulate --synthetic [--models NAMES] [--tokens N] [--json FILE]

The first replays the profile of a model that was served here with `--draft auto`. The second plans models as they were
published for cards that are not here; their routes are made up (see `benchmarks.synthetic`).
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks import published, recorded
from benchmarks.cards import CARDS, EXPERT_SECONDS, GB, LAYER_SECONDS, LINKS
from benchmarks.scenarios import AUTO, MODES, REFERENCE, Result, fastest, run_modes
from benchmarks.synthetic import LOCALITIES
from engine.errors import SpecterError
from engine.process import quiet_libraries

SYNTHETIC_MODES = (REFERENCE, *AUTO)
WIDTH = 175
"""Of what is printed into a file."""
NUM_TOKENS = 240
"""Of a made-up text."""
PLACE = ("budget MB", "link MB/s")
WARM_UP_SHARE = 0.5
"""Of it, in which the cache fills and the governor learns."""


@dataclass(frozen=True)
class Cell:
    """One model on one machine."""

    place: Mapping[str, str | float]
    """What it is, by the names of its columns."""
    results: Mapping[str, Result | None]
    """By mode; None where it does not fit."""


def recorded_cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    found = recorded.situation(arguments)
    for budget in arguments.budgets or recorded.budgets(found):
        for link in arguments.links or recorded.links(found):
            results = run_modes(recorded.with_cell(found, budget, link), tuple(MODES))
            yield Cell(dict(zip(PLACE, (budget / 1e6, link / 1e6), strict=True)), results)


def synthetic_cells(names: list[str], num_tokens: int) -> Iterator[Cell]:
    warm_up_tokens = int(WARM_UP_SHARE * num_tokens)
    for name in names:
        for card in CARDS:
            config, model, machine = published.describe(name, card)
            texts = {routing: published.text(model, locality, num_tokens) for routing, locality in LOCALITIES.items()}
            for link, (routing, tokens) in itertools.product(LINKS, texts.items()):
                found = published.situation(config, model, machine, tokens, card, link, warm_up_tokens)
                place = {"model": name, "card": f"{card.name} {card.num_bytes // GB} GB", "link": link.name}
                yield Cell(place | {"routing": routing}, run_modes(found, SYNTHETIC_MODES))


def recorded_table(cells: list[Cell]) -> Table:
    """A line per mode."""
    table = Table(*PLACE, "mode", "slots", "TPOT ms", "over lru", "MB/token", "hits", "tokens/cycle", "bound")
    for cell in cells:
        reference = cell.results[REFERENCE]
        place = [f"{value:.0f}" for value in cell.place.values()]
        for mode, result in cell.results.items():
            table.add_row(*place, mode, *_recorded_columns(result, reference))
        best = fastest(cell.results)
        name = f"auto={best.mode}" if best else "auto"
        table.add_row(*place, name, *_recorded_columns(best, reference), end_section=True)
    return table


def _recorded_columns(result: Result | None, reference: Result | None) -> list[str]:
    if result is None:
        return ["does not fit"]
    return [
        f"{result.num_slots}",
        f"{result.tpot_seconds * 1e3:.0f}",
        _ratio(reference, result),
        f"{result.transfer_bytes / 1e6:.0f}",
        f"{result.hit_rate:.0%}",
        f"{result.tokens_per_cycle:.1f}",
        result.bound,
    ]


def synthetic_table(cells: list[Cell]) -> Table:
    """A line per cell."""
    titles = ("model", "card", "link", "routing", "slots", "with draft")
    table = Table(*titles, *(f"{mode} ms" for mode in SYNTHETIC_MODES), "auto", "over lru", "tokens/s", "bound")
    for before, cell in zip([None, *cells], cells, strict=False):
        if before and before.place["model"] != cell.place["model"]:
            table.add_section()
        table.add_row(*map(str, cell.place.values()), *_synthetic_columns(cell.results))
    return table


def _synthetic_columns(results: Mapping[str, Result | None]) -> list[str]:
    reference, best, specter = results[REFERENCE], fastest(results), results["specter"]
    if reference is None or best is None:
        return ["does not fit"]
    return [
        f"{reference.num_slots} ({reference.num_slots / reference.num_experts:.0%})",
        f"{specter.num_slots} ({specter.num_slots / specter.num_experts:.0%})" if specter else "does not fit",
        *(f"{result.tpot_seconds * 1e3:.1f}" if (result := results[mode]) else "-" for mode in SYNTHETIC_MODES),
        best.mode,
        _ratio(reference, best),
        f"{1 / best.tpot_seconds:.1f}",
        best.bound,
    ]


def _ratio(reference: Result | None, result: Result) -> str:
    return f"{reference.tpot_seconds / result.tpot_seconds:.2f}" if reference else "-"


def as_json(cells: list[Cell]) -> list[dict[str, Any]]:
    return [
        {
            **cell.place,
            "modes": {mode: result and msgspec.structs.asdict(result) for mode, result in cell.results.items()},
            "auto": best.mode if (best := fastest(cell.results)) else None,
        }
        for cell in cells
    ]


SYNTHETIC_NOTES = (
    "The routes are SYNTHETIC, not recorded from these models: no more than an estimate. "
    + "; ".join(f"{name}: {locality}" for name, locality in LOCALITIES.items())
    + f". Compute is by bytes, plus {LAYER_SECONDS * 1e3:g} ms a layer and {EXPERT_SECONDS * 1e3:g} ms an expert; "
    f"{published.MAX_MODEL_LEN} tokens of context; all experts in host memory."
)
RECORDED_NOTES = "Nothing of n-grams is simulated: plain stands for them. Auto takes the faster of plain and specter."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    recorded.add_arguments(parser)
    recorded.add_cells(parser)
    parser.add_argument("--synthetic", action="store_true", help="published models on cards that are not here")
    parser.add_argument("--models", default=",".join(published.MODELS), help="of --synthetic")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="length of a made-up text")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    arguments = parser.parse_args()
    quiet_libraries()
    try:
        if arguments.synthetic:
            cells = list(synthetic_cells(arguments.models.split(","), arguments.tokens))
            table, notes = synthetic_table(cells), SYNTHETIC_NOTES
        else:
            cells = list(recorded_cells(arguments))
            table, notes = recorded_table(cells), RECORDED_NOTES
    except SpecterError as error:
        sys.exit(str(error))
    for column in table.columns:
        column.no_wrap = True
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table, notes)
    if arguments.json:
        arguments.json.write_text(json.dumps({"notes": notes, "cells": as_json(cells)}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
