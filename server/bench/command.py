"""`specter bench`: from its options to what it prints and writes."""

import argparse
import asyncio
import shlex
import signal
from collections.abc import Coroutine, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from engine.config import EngineConfig
from engine.errors import ConfigError
from server.bench.budgets import parse_budgets
from server.bench.cgroup import MemoryGroups
from server.bench.links import default_links, parse_links
from server.bench.modes import DEFAULT, QUICK, mode_named, parse_modes
from server.bench.prepare import Plan
from server.bench.report import bench_json
from server.bench.results import BenchResult
from server.bench.run import run_bench
from server.bench.tables import COLUMNS, print_result
from server.bench.trace import chrome_trace

NUM_TOKENS = 24
"""Per reply: with these the default run takes under an hour on two cores, and a quick one under eight minutes."""
NUM_QUICK_TOKENS = 16


def bench(args: argparse.Namespace, config: EngineConfig, argv: Sequence[str], stand_in: Sequence[str] | None) -> int:
    """The exit code: 0, or 1 where every mode has failed everywhere. Raises SpecterError, KeyboardInterrupt."""
    plan = bench_plan(args, config)
    _check_outputs(args)

    def write_json(result: BenchResult) -> None:
        if args.json:
            args.json.write_text(bench_json(result) + "\n")

    with MemoryGroups() as groups:
        work = run_bench(
            plan,
            config,
            groups,
            command=shlex.join(("specter", *argv)),
            stand_in=stand_in,
            console=Console(stderr=True),
            on_result=write_json,
        )
        try:
            result = asyncio.run(_until_terminated(work))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    write_json(result)
    console = Console()
    print_result(result, console if console.is_terminal else Console(width=COLUMNS))
    if args.trace:
        args.trace.write_text(chrome_trace(result.traces))
    if args.plot:
        from server.bench.plots import write_plots

        write_plots(result, args.plot)
    return 0 if any(mode.measures for cell in result.cells for mode in cell.modes) else 1


def bench_plan(args: argparse.Namespace, config: EngineConfig) -> Plan:
    """Raises ConfigError for an option that cannot be used."""
    budgets = parse_budgets(args.budgets) if args.budgets else None
    if budgets is None and isinstance(config.device_memory, int):
        # From the environment or the file: the flag is a list here.
        budgets = [int(config.device_memory)]
    names = QUICK if args.quick else DEFAULT
    return Plan(
        modes=parse_modes(args.modes) if args.modes is not None else [mode_named(name) for name in names],
        links=parse_links(args.link) if args.link is not None else default_links(args.quick),
        budgets=budgets,
        quick=args.quick,
        num_tokens=args.max_tokens or (NUM_QUICK_TOKENS if args.quick else NUM_TOKENS),
        num_rounds=args.rounds,
        trace=args.trace is not None,
    )


def _check_outputs(args: argparse.Namespace) -> None:
    """Before the run: nobody wants to know afterwards."""
    if args.plot and find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'specter[bench]'.")
    for flag, path in (("--json", args.json), ("--trace", args.trace)):
        if path and not path.parent.is_dir():
            raise ConfigError(f"{flag} is {str(path)!r}, but there is no directory {path.parent}.")
        if path and path.is_dir():
            raise ConfigError(f"{flag} is {str(path)!r}, which is a directory; name a file.")
    if args.plot:
        try:
            Path(args.plot).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--plot is {str(args.plot)!r}, which cannot be used: {error.strerror}.") from None


async def _until_terminated(work: Coroutine[Any, Any, BenchResult]) -> BenchResult:
    """SIGTERM ends it as Ctrl-C does: with no process and no control group left."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task
