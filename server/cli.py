"""The command line, generated from the settings."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import ByteSize
from pydantic.fields import FieldInfo

from engine.config import EngineConfig
from engine.errors import ConfigError
from server import __version__
from server.settings import ENV_PREFIX, Settings, did_you_mean

PRECEDENCE = (
    f"Every option can also be set in the environment ({ENV_PREFIX}DEVICE_MEMORY=2GB) or in the YAML file "
    "(device_memory: 2GB); flags win over the environment, and that over the file."
)
COMMANDS = {"serve": tuple(Settings.model_fields), "demo": ("cache",)}
"""The settings that each command takes as flags."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[0].upper()}{message[1:]}. See '{self.prog} --help'.")


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The command, the configuration file, and, under their names, the settings that were given as flags."""
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        # A value after an unknown flag looks like an argument, so the flags are the better suspects.
        word = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
        if word == "--model" and args.command == "serve":
            raise ConfigError("The model is an argument, not an option: specter serve MODEL.")
        kind = "option" if word.startswith("-") else "argument"
        known = ["--config", *map(_flag, COMMANDS.get(args.command, ()))]
        prog = f"specter {args.command}" if args.command else "specter"
        raise ConfigError(f"Unknown {kind} {word}.{did_you_mean(word, known)} See '{prog} --help'.")
    if args.command is None:
        raise ConfigError(f"Name a command: {' or '.join(COMMANDS)}. See 'specter --help'.")
    return args


def _parser() -> Parser:
    parser = Parser(
        prog="specter",
        description="Serve mixture-of-experts models that are bigger than the GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"specter {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    serve = commands.add_parser(
        "serve", help="serve a model over HTTP", description="Serve a model.", epilog=PRECEDENCE, allow_abbrev=False
    )
    _add_config(serve)
    engine_options = serve.add_argument_group("model and engine")
    server_options = serve.add_argument_group("server")
    for name in COMMANDS["serve"]:
        group = engine_options if name in EngineConfig.model_fields else server_options
        _add_setting(group, name, Settings.model_fields[name])

    demo = commands.add_parser(
        "demo",
        help="build the demo model and print where it is",
        description="Build the demo model in the cache directory, unless it is there, and print its path.",
        allow_abbrev=False,
    )
    _add_config(demo)
    for name in COMMANDS["demo"]:
        _add_setting(demo, name, Settings.model_fields[name])
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings.")


def _add_setting(group: argparse._ActionsContainer, name: str, field: FieldInfo) -> None:
    help_text = (field.description or "").replace("%", "%%")
    if field.default is not None:
        shown = ("on" if field.default else "off") if field.annotation is bool else field.default
        help_text += f" Default: {shown}."
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help_text}
    if name == "model":
        group.add_argument(name, nargs="?", metavar="MODEL", **options)
    elif field.annotation is bool:
        group.add_argument(_flag(name), action=argparse.BooleanOptionalAction, **options)
    else:
        group.add_argument(_flag(name), metavar=_metavar(field), **options)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return "{" + ",".join(get_args(field.annotation)) + "}"
    kinds = (field.annotation, *get_args(field.annotation))
    names = {ByteSize: "SIZE", int: "N", float: "SECONDS", Path: "DIRECTORY"}
    return next((names[kind] for kind in kinds if kind in names), "TEXT")
