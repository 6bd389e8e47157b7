"""The command `specter`."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence

from engine.client import EngineClient
from engine.config import DEMO_MODEL, PackConfig
from engine.errors import ConfigError, SpecterError
from engine.protocol import Tier
from server.cli import parse_args
from server.logs import set_up_logging
from server.settings import Settings, load_settings, unknown_environment

DOES_NOT_FIT = 1
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None, engine_command: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; `engine_command` stands in for the engine process."""
    try:
        argv = sys.argv[1:] if argv is None else argv
        args = parse_args(argv)
        settings = _settings(args)
        match args.command:
            case "plan":
                return _plan(args, settings, engine_command)
            case "pack" | "demo":
                return _prepare(args, settings, engine_command)
            case "bench":
                from server.bench.command import bench

                return bench(args, settings.engine_config(), argv, engine_command)
        return _serve(settings, engine_command)
    except SpecterError as error:
        print(f"specter: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _settings(args: argparse.Namespace) -> Settings:
    flags = {name: value for name, value in vars(args).items() if name in Settings.model_fields}
    if args.command == "demo":
        flags["model"] = DEMO_MODEL
    settings = load_settings(flags, args.config)
    set_up_logging(settings.log_level)
    for sentence in unknown_environment():
        logging.getLogger(__name__).warning(sentence)
    return settings


def _serve(settings: Settings, engine_command: Sequence[str] | None) -> int:
    from server.listener import listen
    from server.serve import serve

    with listen(settings.host, settings.port) as listener:
        return asyncio.run(serve(settings, listener, engine_command))


def _prepare(args: argparse.Namespace, settings: Settings, engine_command: Sequence[str] | None) -> int:
    """Print the directory of what the engine process has made."""
    from server.task import run_task

    config = settings.engine_config()
    if args.command == "demo":
        work = run_task("prepare", config, EngineClient.wait_prepared, engine_command)
    else:
        config = PackConfig.model_validate({**dict(config), "out": args.out})
        work = run_task("pack", config, EngineClient.wait_prepared, engine_command)
    print(asyncio.run(work))
    return 0


def _plan(args: argparse.Namespace, settings: Settings, engine_command: Sequence[str] | None) -> int:
    from rich.console import Console

    from server.plan import plan_json, print_plan, with_bandwidths
    from server.task import run_task

    rates: dict[Tier, float | None] = {"host": args.link_bandwidth, "disk": args.disk_bandwidth}
    given = {tier: rate for tier, rate in rates.items() if rate is not None}
    work = run_task("plan", settings.engine_config(), EngineClient.wait_planned, engine_command)
    plan = with_bandwidths(asyncio.run(work), given)
    if args.json:
        print(plan_json(plan))
    else:
        print_plan(plan, Console(), given)
    return 0 if plan.fits else DOES_NOT_FIT


if __name__ == "__main__":
    sys.exit(main())
