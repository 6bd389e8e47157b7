"""Replies and results that were not measured, with numbers that are easy to follow."""

from typing import Any

import msgspec

from engine.protocol import CycleStats
from server.bench.cell import Cell, CellRun, ModeRun
from server.bench.links import Link
from server.bench.modes import mode_named
from server.bench.reply import Reply
from server.bench.results import BenchResult, CellResult
from server.bench.schedule import Step, steps
from tests.server.fake_engine import capabilities

PACED = Link("paced", 300_000_000, 300_000_000.0)
REAL = Link("real", None, 1_500_000_000.0)
GREEDY, SAMPLED = Step(0, "chat", "greedy"), Step(0, "code", "sampled")

CYCLE = CycleStats(
    num_draft_tokens=4,
    num_accepted_tokens=2,
    draft_seconds=0.06,
    plan_seconds=0.003,
    transfer_wait_seconds=0.03,
    verify_seconds=0.09,
    num_expert_hits=30,
    num_expert_misses=10,
    num_prefetches_used=8,
    num_prefetches_wasted=2,
    num_demand_fetches=2,
    prefetch_bytes=50_000_000,
    demand_bytes=10_000_000,
    transfer_seconds=0.15,
)
"""Of three tokens in 0.3 s."""


def reply(tpot_seconds: float = 0.1, *cycles: CycleStats, **changes: Any) -> Reply:
    """Of a first token, and three for each cycle."""
    num_tokens = 3 * len(cycles) if cycles else 6
    values: dict[str, Any] = {
        "token_ids": list(range(1 + num_tokens)),
        "num_first_tokens": 1,
        "ttft_seconds": 2.0,
        "decode_seconds": tpot_seconds * num_tokens,
        "prefill": CycleStats(prefetch_bytes=300_000_000),
        "cycles": list(cycles or (CYCLE, CYCLE)),
    }
    return Reply(**{**values, **changes})


def mode_run(name: str, *replies: Reply, failure: str | None = None) -> ModeRun:
    mode = mode_named(name)
    return ModeRun(
        mode=mode,
        replies=dict(zip(steps(["chat", "code", "prose", "long"], 1), replies, strict=False)),
        capabilities=capabilities(mode.settings["draft"]) if replies else None,
        limit_bytes=1_400_000_000 if replies else None,
        peak_rss_bytes=900_000_000 if replies else None,
        failure=failure,
    )


def example_cell(budget_bytes: int, link: Link, room: float) -> CellResult:
    """All modes as they may come out; `room` is the share of the experts that there are slots for."""
    slowness = 1.0 if link.limit else 0.45
    runs = []
    # by mode: TPOT, tokens per cycle, drafted per cycle, share of the bytes of a cold token
    shapes = {
        "on-demand": (1.2, 1, 0, 0.9),
        "lru": (0.75, 1, 0, 0.55),
        "plain": (0.65, 1, 0, 0.5),
        "ngram": (0.6, 1.4, 2.1, 0.48),
        "specter": (0.42, 3.4, 4.8, 0.35),
        "specter-4": (0.45, 3.1, 4.0, 0.38),
        "auto": (0.41, 3.3, 4.6, 0.345),
        "accelerate": (4.5, 1, 0, 0.0),
    }
    for name, (tpot, num_tokens, num_drafted, share) in shapes.items():
        bytes_per_cycle = int(share * (1.2 - room) * 330e6 * num_tokens)
        cycles = [
            CycleStats(
                num_draft_tokens=round(num_drafted),
                num_accepted_tokens=min(round(num_drafted), (7 * i) % (1 + round(num_drafted))),
                draft_seconds=0.02 * num_drafted,
                verify_seconds=0.06 * (1 + 0.2 * num_drafted),
                transfer_wait_seconds=0.1 * tpot,
                num_expert_hits=int(100 * room),
                num_expert_misses=int(100 * (1 - room)),
                prefetch_bytes=bytes_per_cycle,
                transfer_seconds=0.5 * tpot,
            )
            if share
            else CycleStats()
            for i in range(1, 8)
        ]
        replies = [
            reply(
                tpot * slowness * (1.3 - room) * noise,
                *cycles,
                decode_seconds=tpot * slowness * (1.3 - room) * noise * round(7 * num_tokens),
                token_ids=list(range(1 + round(7 * num_tokens))),
            )
            for noise in (0.9, 1.0, 1.05, 1.2)
        ]
        runs.append(mode_run(name, *replies))
    return CellResult.of(CellRun(Cell(budget_bytes, link), runs))


def example_result() -> BenchResult:
    budgets = {730_000_000: 0.35, 900_000_000: 0.5, 1_200_000_000: 0.75}
    cells = [example_cell(budget, link, room) for budget, room in budgets.items() for link in (REAL, PACED)]
    return bench_result(*cells)


def bench_result(*cells: CellResult) -> BenchResult:
    return BenchResult(
        command="specter bench --quick",
        machine={"device": "CPU (2 threads)"},
        settings={"num_rounds": 1},
        notes=["A reply has 16 tokens."],
        cells=cells,
        traces={},
    )


def changed(stats: CycleStats, **values: Any) -> CycleStats:
    return msgspec.structs.replace(stats, **values)
