"""The command `specter`."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence

from engine.config import DEMO_MODEL, EngineConfig
from engine.errors import ConfigError, SpecterError
from server.cli import parse_args
from server.logs import set_up_logging
from server.settings import Settings, load_settings, unknown_environment

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None, engine_command: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; `engine_command` stands in for the engine process."""
    try:
        args = parse_args(sys.argv[1:] if argv is None else argv)
        settings = _settings(args)
        if args.command == "demo":
            return _demo(settings.engine_config(), engine_command)
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

    with listen(settings.host, settings.port) as listener:
        from server.lifecycle import serve

        return asyncio.run(serve(settings, listener, engine_command))


def _demo(config: EngineConfig, engine_command: Sequence[str] | None) -> int:
    from server.prepare import prepare

    print(asyncio.run(prepare(config, engine_command)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
