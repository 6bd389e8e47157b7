"""The run: prepare, then cell after cell, with progress on stderr."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from rich.console import Console
from rich.text import Text

from engine.config import EngineConfig
from engine.errors import SpecterError, first_line
from engine.protocol import Loading, TraceEvent
from server.bench.cell import Setup, run_cell, trace_mode
from server.bench.cgroup import MemoryGroups
from server.bench.machine import describe_machine
from server.bench.prepare import Plan, Preparation, prepare
from server.bench.results import BenchResult, CellResult
from server.bench.schedule import SAMPLINGS, schedule
from server.progress import LoadProgress

OnResult = Callable[[BenchResult], None]


async def run_bench(
    plan: Plan,
    config: EngineConfig,
    groups: MemoryGroups,
    *,
    command: str,
    stand_in: Sequence[str] | None,
    console: Console,
    on_result: OnResult,
) -> BenchResult:
    """`command` is what the user typed; `stand_in` replaces every engine; `on_result` gets what there is, cell by cell.

    Raises SpecterError where nothing can be measured; a mode that fails is a result.
    """
    prepared = await prepare(plan, config, groups, stand_in)
    setup = prepared.setup
    for note in prepared.notes:
        console.print(Text(note))

    def result(cells: list[CellResult], traces: dict[str, list[TraceEvent]], notes: list[str]) -> BenchResult:
        return BenchResult(
            command=command,
            machine=describe_machine(setup.plan),
            settings=_settings(plan, prepared),
            notes=[*prepared.notes, *notes],
            cells=cells,
            traces=traces,
        )

    cells: list[CellResult] = []
    async with aclosing(_cells(prepared, console)) as found:
        async for cell in found:
            cells.append(cell)
            on_result(result(cells, {}, []))
    traces, complaints = await _traces(setup, cells[-1]) if plan.trace else ({}, [])
    return result(cells, traces, complaints)


async def _cells(prepared: Preparation, console: Console) -> AsyncGenerator[CellResult, None]:
    setup, cells = prepared.setup, prepared.cells
    names = [prompt.name for prompt in setup.prompts]
    num_turns = len(list(schedule(setup.modes, names, setup.num_rounds)))
    num_done = 0

    with LoadProgress(console) as show:

        def tell() -> None:
            show(Loading("Replies", num_done, num_turns * len(cells)))

        def on_turn() -> None:
            nonlocal num_done
            num_done += 1
            tell()

        for number, cell in enumerate(cells, 1):
            console.print(Text(f"Cell {number} of {len(cells)}: {cell}"))
            tell()
            yield CellResult.of(await run_cell(setup, cell, on_turn))


async def _traces(setup: Setup, last: CellResult) -> tuple[dict[str, list[TraceEvent]], list[str]]:
    """Of the modes that did not fail in the cell, and a sentence about each of them that does now."""
    traces, complaints = dict[str, list[TraceEvent]](), list[str]()
    for result in last.modes:
        if result.run.failure is not None or result.mode.is_peer:
            continue
        try:
            traces[result.mode.name] = await trace_mode(setup, last.cell, result.mode)
        except SpecterError as error:
            complaints.append(f"{result.mode.name} could not be traced: {first_line(error)}")
    return traces, complaints


def _settings(plan: Plan, prepared: Preparation) -> dict[str, Any]:
    setup = prepared.setup
    return {
        "model": setup.plan.model,
        "num_tokens": {mode.name: mode.max_tokens(plan.num_tokens) for mode in plan.modes},
        "num_rounds": plan.num_rounds,
        "prompts": [
            {"name": prompt.name, "kind": prompt.kind, "num_tokens": len(prompt.token_ids)} for prompt in setup.prompts
        ],
        "samplings": {name: sampling.temperature for name, sampling in SAMPLINGS.items()},
        "cgroup_version": setup.groups.version,
    }
