"""The flags of commands that are no settings, as `argparse` takes them, by command."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from engine.config import PackConfig

Options = Mapping[str, dict[str, Any]]


def _rate(text: str) -> float:
    try:
        num_bytes = TypeAdapter(ByteSize).validate_python(text.removesuffix("/s"))
    except ValidationError:
        num_bytes = ByteSize(0)
    if not num_bytes:
        raise argparse.ArgumentTypeError(f"{text!r} is no bandwidth; write bytes per second such as 25GB or 1.5GiB")
    return float(num_bytes)


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


NONE: Options = {}
PACK: Options = {
    "--out": {"type": Path, "metavar": "DIRECTORY", "help": PackConfig.model_fields["out"].description},
}
PLAN: Options = {
    "--link-bandwidth": {
        "type": _rate,
        "metavar": "RATE",
        "help": "Bytes per second from host memory to the device, such as 25GB; by default as measured here.",
    },
    "--disk-bandwidth": {
        "type": _rate,
        "metavar": "RATE",
        "help": "Bytes per second from the disk, such as 1.5GiB; by default as measured here.",
    },
    "--json": {"action": "store_true", "help": "Print the plan as JSON, with sizes in bytes and times in seconds."},
}
BENCH: Options = {
    "--quick": {"action": "store_true", "help": "Fewer modes, budgets, links, prompts and tokens: some minutes."},
    "--modes": {
        "metavar": "A,B,..",
        "help": "Modes to compare: on-demand, lru, plain, ngram, specter, auto, accelerate, and with a fixed draft "
        "length such as specter-4 or ngram-8.",
    },
    "--device-memory": {
        "dest": "budgets",
        "metavar": "SIZE,SIZE,..",
        "help": "Budgets to compare at; by default three, whose slots hold 35%%, 50%% and 75%% of the experts where "
        "there is no draft.",
    },
    "--link": {
        "metavar": "A,B,..",
        "help": "real: experts move as fast as here; paced: so slowly that a token without a resident expert takes 12 "
        "times its computation, as on a GPU; or a rate such as 1.5GB/s. By default real and paced.",
    },
    "--max-tokens": {"type": _positive, "metavar": "N", "help": "Tokens per reply; fewer in modes that are slow."},
    "--rounds": {
        "type": _positive,
        "default": 1,
        "metavar": "N",
        "help": "How often each prompt is asked; once by default.",
    },
    "--json": {"type": Path, "metavar": "FILE", "help": "Write every result to this file, after each cell."},
    "--trace": {
        "type": Path,
        "metavar": "FILE",
        "help": "Write what the engines do in one more reply each as a trace that https://ui.perfetto.dev opens.",
    },
    "--plot": {"type": Path, "metavar": "DIRECTORY", "help": "Draw the results; needs pip install 'specter[bench]'."},
}
