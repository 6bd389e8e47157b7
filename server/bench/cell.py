"""One cell: all modes at one budget over one link, on the same prompts, a reply at a time."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from engine.config import EngineConfig
from engine.errors import SpecterError, first_line
from engine.protocol import Capabilities, ModelPlan, SamplingParams, Submit, TraceEvent
from server.bench.cgroup import MemoryGroups
from server.bench.engine import BenchEngine, engine_command
from server.bench.links import Link
from server.bench.machine import forget_files, free_bytes, is_cpu
from server.bench.modes import Mode, bench_config
from server.bench.pool import EnginePool, num_side_by_side
from server.bench.prompts import TokenizedPrompt
from server.bench.reply import Reply
from server.bench.schedule import SAMPLINGS, Step, schedule
from server.formats import megabytes

RUNTIME_BYTES = 700_000_000
"""What an engine process takes beside its budget, on a CPU: PyTorch's and transformers' code, Python, stacks."""
CUDA_RUNTIME_BYTES = 4_000_000_000
"""The same with a CUDA context, its libraries, and what the host keeps of kernels."""
WARM_UP_TOKENS = 3
TRACE_TOKENS = 16


class Cell(NamedTuple):
    budget_bytes: int
    link: Link

    def __str__(self) -> str:
        return f"{self.budget}, {self.link}"

    @property
    def budget(self) -> str:
        """Exact enough to tell budgets apart, which are whole megabytes."""
        return megabytes(self.budget_bytes)


@dataclass(frozen=True)
class Setup:
    """What all cells share."""

    config: EngineConfig
    modes: Sequence[Mode]
    prompts: Sequence[TokenizedPrompt]
    warm_up: TokenizedPrompt
    num_tokens: int
    num_rounds: int
    plan: ModelPlan
    """Of some engine at some budget; what differs between cells is not taken from it."""
    directories: Sequence[Path]
    """The model's, whose files are dropped from the page cache."""
    groups: MemoryGroups
    engine_command: Sequence[str] | None
    """Stands in for every engine."""

    def limit_bytes(self, cell: Cell) -> int:
        """What a process may take in a cell."""
        host_bytes = self.plan.budget_bytes.get("host", 0)
        if is_cpu(self.plan):
            return cell.budget_bytes + host_bytes + RUNTIME_BYTES
        return host_bytes + CUDA_RUNTIME_BYTES

    def max_engines(self, cell: Cell) -> int:
        """Side by side. On a GPU only one: two would share its memory, and each plans with all of it."""
        return num_side_by_side(self.limit_bytes(cell), free_bytes()) if is_cpu(self.plan) else 1


@dataclass
class ModeRun:
    """What one mode did in one cell. Mutable while the cell runs."""

    mode: Mode
    replies: dict[Step, Reply] = field(default_factory=dict)
    capabilities: Capabilities | None = None
    """Of the last engine that started."""
    limit_bytes: int | None = None
    """Of the control group that it ran in; None where it ran in none."""
    peak_rss_bytes: int | None = None
    failure: str | None = None
    """Why the mode was given up in this cell."""


@dataclass(frozen=True)
class CellRun:
    cell: Cell
    modes: list[ModeRun]


async def run_cell(setup: Setup, cell: Cell, on_turn: Callable[[], None]) -> CellRun:
    """`on_turn` is called after each reply, or what would have been one: a mode that failed is left out."""
    runs = {mode.name: ModeRun(mode) for mode in setup.modes}
    prompts = {prompt.name: prompt for prompt in setup.prompts}

    async def start(name: str) -> BenchEngine:
        return await _start(setup, cell, runs[name])

    async with EnginePool(start, setup.max_engines(cell)) as pool:
        for step, mode in schedule(setup.modes, list(prompts), setup.num_rounds):
            run = runs[mode.name]
            if run.failure is None:
                submit = _submit(prompts[step.prompt], mode.max_tokens(setup.num_tokens), SAMPLINGS[step.sampling])
                try:
                    engine = await pool.get(mode.name)
                    run.replies[step] = await engine.ask(submit)
                    run.peak_rss_bytes = max(run.peak_rss_bytes or 0, engine.peak_rss_bytes or 0) or None
                except SpecterError as error:
                    run.failure = first_line(error)
                    await pool.discard(mode.name)
            on_turn()
    return CellRun(cell, list(runs.values()))


async def trace_mode(setup: Setup, cell: Cell, mode: Mode) -> list[TraceEvent]:
    """The events of one more reply, of an engine of its own; raises SpecterError."""
    engine = await _start(setup, cell, ModeRun(mode), trace=True)
    try:
        reply = await engine.ask(_submit(setup.prompts[0], TRACE_TOKENS, SAMPLINGS["greedy"]))
    finally:
        await engine.close()
    return reply.events


async def _start(setup: Setup, cell: Cell, run: ModeRun, trace: bool = False) -> BenchEngine:
    """An engine that has given its first reply, which is not measured."""
    mode = run.mode
    for directory in setup.directories:
        forget_files(directory)
    engine = await BenchEngine.start(
        bench_config(setup.config, mode, cell.budget_bytes, cell.link.limit, trace),
        engine_command(mode.module, setup.engine_command),
        setup.groups,
        setup.limit_bytes(cell),
        lambda message: None,
    )
    run.capabilities, run.limit_bytes = engine.capabilities, engine.limit_bytes
    try:
        await engine.ask(_submit(setup.warm_up, 1 if mode.is_slow else WARM_UP_TOKENS, SAMPLINGS["greedy"]))
    except BaseException:
        await engine.close()
        raise
    return engine


def _submit(prompt: TokenizedPrompt, max_tokens: int, sampling: SamplingParams) -> Submit:
    return Submit(uuid.uuid4().hex, prompt.token_ids, max_tokens, sampling, ignore_eos=True)
