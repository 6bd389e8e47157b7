"""The JSON file: everything, with one entry per mode and cell, and one per ratio."""

import json
from typing import Any

import msgspec

from server import __version__
from server.bench.cell import Cell
from server.bench.measures import Counters, Measures
from server.bench.results import BenchResult, CellResult, ModeResult


def bench_json(result: BenchResult) -> str:
    content = {
        "specter": __version__,
        "command": result.command,
        "machine": result.machine,
        "settings": result.settings,
        "notes": list(result.notes),
        "cells": [_entry(cell, mode) for cell in result.cells for mode in cell.modes],
        "ratios": [
            {**_cell(cell.cell), **msgspec.to_builtins(ratio)} for cell in result.cells for ratio in cell.ratios
        ],
    }
    return json.dumps(content, indent=2)


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "cell": str(cell),
        "budget_bytes": cell.budget_bytes,
        "link": cell.link.kind,
        "link_limit": cell.link.limit,
        "bandwidth": cell.link.bandwidth,
    }


def _entry(cell: CellResult, mode: ModeResult) -> dict[str, Any]:
    run, capabilities = mode.run, mode.run.capabilities
    return {
        **_cell(cell.cell),
        "mode": mode.mode.name,
        "failure": run.failure,
        "drafter": capabilities.drafter if capabilities else None,
        "draft_length": capabilities.draft_length if capabilities else None,
        "num_slots": capabilities.plan.num_slots if capabilities else None,
        "cgroup_limit_bytes": run.limit_bytes,
        "peak_rss_bytes": run.peak_rss_bytes,
        **_measures(mode.measures),
        "same_output": msgspec.to_builtins(mode.sameness),
        "replies": [
            {
                **step._asdict(),
                "ttft_seconds": reply.ttft_seconds,
                "tpot_seconds": reply.tpot_seconds,
                "token_ids": reply.token_ids,
            }
            for step, reply in run.replies.items()
        ],
    }


def _measures(measures: Measures | None) -> dict[str, Any]:
    """All of them in any case, so that every entry has the same keys."""
    shown = dict.fromkeys((*Measures.__struct_fields__, *Counters.__struct_fields__))
    if measures:
        shown.update(msgspec.to_builtins(measures))
        shown.update(msgspec.to_builtins(measures.counters) or {})
    del shown["counters"]
    return shown
