"""The command line, generated from the settings."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

from pydantic import ByteSize
from pydantic.fields import FieldInfo

from engine.config import EngineConfig
from engine.errors import ConfigError
from server import __version__
from server.bench.modes import SHARED
from server.options import BENCH, NONE, PACK, PLAN, Options
from server.settings import ENV_PREFIX, Settings, did_you_mean

PRECEDENCE = (
    f"Every setting can also be given in the environment ({ENV_PREFIX}DEVICE_MEMORY=2GB) or in the YAML file "
    "(device_memory: 2GB); flags win over the environment, and that over the file."
)


class Command(NamedTuple):
    help: str
    description: str
    settings: tuple[str, ...]
    """The settings that it takes as flags."""
    options: Options = NONE
    """The flags that it takes besides."""


COMMANDS = {
    "serve": Command("serve a model over HTTP", "Serve a model.", tuple(Settings.model_fields)),
    "plan": Command(
        "print where a model would go, and how fast it could be there",
        "Print where everything would go and what that costs, without loading weights. The exit code is 0 where the "
        "model fits and 1 where it does not.",
        tuple(EngineConfig.model_fields),
        PLAN,
    ),
    "pack": Command(
        "pack a model ahead of its first start, and print where the pack is",
        "Write the packed form of a model, with its draft, unless it is there, and print its directory.",
        ("model", "cache", "draft", "draft_weights", "draft_group_size"),
        PACK,
    ),
    "bench": Command(
        "measure modes of decoding against each other",
        "Have several modes of decoding, and another server's, reply to the same prompts in turn with the same memory, "
        "and print how fast each is, why, and by how much one is faster than another.",
        tuple(name for name in EngineConfig.model_fields if name not in (*SHARED, "device_memory")),
        BENCH,
    ),
    "demo": Command(
        "build the demo model and print where it is",
        "Build the demo model in the cache directory, unless it is there, and print its path.",
        ("cache",),
    ),
}


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The command, the configuration file, the command's options, and the settings that were given as flags."""
    args, unknown = _parser().parse_known_args(argv)
    if unknown:
        raise ConfigError(_unknown(unknown, args.command))
    if args.command is None:
        *most, last = COMMANDS
        raise ConfigError(f"Name a command: {', '.join(most)} or {last}. See 'specter --help'.")
    return args


def _unknown(words: Sequence[str], name: str | None) -> str:
    # A value after an unknown flag looks like an argument, so the flags are the better suspects.
    word = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
    kind = "option" if word.startswith("-") else "argument"
    prog, known = "specter", ["--version"]
    if name is not None:
        command = COMMANDS[name]
        prog, known = f"specter {name}", ["--config", *map(_flag, command.settings), *command.options]
        if word == "--model" and "model" in command.settings:
            return f"The model is an argument, not an option: {prog} MODEL."
    return f"Unknown {kind} {word}.{did_you_mean(word, known)} See '{prog} --help'."


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[0].upper()}{message[1:]}. See '{self.prog} --help'.")


def _parser() -> Parser:
    parser = Parser(
        prog="specter",
        description="Serve mixture-of-experts models that are bigger than the GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"specter {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(
            name, help=command.help, description=command.description, epilog=PRECEDENCE, allow_abbrev=False
        )
        _add_command(subparser, command)
    return parser


def _add_command(parser: argparse.ArgumentParser, command: Command) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings.")
    for flag, keywords in command.options.items():
        parser.add_argument(flag, **keywords)
    engine_options = parser.add_argument_group("model and engine")
    server_options = parser.add_argument_group("server")
    for name in command.settings:
        group = engine_options if name in EngineConfig.model_fields else server_options
        _add_setting(group, name, Settings.model_fields[name])


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
