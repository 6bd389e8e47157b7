"""The profile that an automatic choice left beside a model's pack."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import msgspec
from pydantic import ByteSize, TypeAdapter

from benchmarks.scenarios import Situation
from engine.build import profile_subject
from engine.config import BenchConfig, EngineConfig
from engine.description import describe_model
from engine.device import open_device
from engine.errors import ConfigError
from engine.loading import locate_configuration
from engine.packing import find_records
from engine.packing.profiles import read_profile
from engine.planning import Machine
from engine.profile import Profile
from engine.sizing import Choices
from server.bench.budgets import SHARES
from server.bench.links import COLD_TOKEN_COMPUTES

MB = 10**6
SETTINGS = ("model", "cache", "device", "draft_weights")
LINKS = (COLD_TOKEN_COMPUTES, COLD_TOKEN_COMPUTES / 3)
"""How many times its computation a token without any resident expert takes on the default links: as `specter bench`
paces it, and about what the disk of a machine without a GPU is like."""


def add_arguments(parser: ArgumentParser) -> None:
    for name in SETTINGS:
        parser.add_argument(f"--{name.replace('_', '-')}", help=EngineConfig.model_fields[name].description)
    parser.add_argument("--profile", type=Path, help="a profile's file, instead of the one beside the model's pack")


def add_cells(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--budgets",
        type=sizes,
        default=[],
        help="device memory such as 1GB,1.5GB; by default for shares of the experts",
    )
    parser.add_argument(
        "--links",
        type=sizes,
        default=[],
        help="bytes per second such as 300MB,1.5GB; by default in proportion to the computation",
    )


def sizes(text: str) -> list[int]:
    return [int(TypeAdapter(ByteSize).validate_python(word)) for word in text.split(",")]


def situation(arguments: Namespace) -> Situation:
    """The model on this machine, with the first of the default links. Raises `SpecterError` without a profile."""
    settings = {name: value for name in SETTINGS if (value := getattr(arguments, name)) is not None}
    config = BenchConfig.model_validate(settings | {"draft": "auto"})
    path = locate_configuration(config, lambda message: None)
    device = open_device(config.device)
    machine = Machine.of(device)
    model = describe_model(config, path, machine.device)
    found = Situation(config, model, machine, _profile(arguments.profile, config, path, machine, model.choices), 0.0)
    return found._replace(bandwidth=links(found)[0])


def links(situation: Situation) -> list[float]:
    """Bytes per second at which a cold token takes as `LINKS` says."""
    model, times = situation.model, situation.profile.times
    cold_bytes = model.sizes.cold_token_bytes(model.skeleton.top_k)
    return [cold_bytes / (computes * times.verify_seconds[0]) for computes in LINKS]


def budgets(situation: Situation) -> list[int]:
    """Device memory that leaves room for these shares of the experts, less what longer steps of prompts take of it."""
    sizes = situation.model.sizes
    others = sizes.needs(situation.model.choices.without_draft()).total
    return [-(-int(others + share * sizes.num_experts * sizes.expert_bytes) // MB) * MB for share in SHARES]


def _profile(file: Path | None, config: BenchConfig, path: Path, machine: Machine, choices: Choices) -> Profile:
    if file is not None:
        return msgspec.msgpack.decode(file.read_bytes(), type=Profile)
    records = find_records(path, config.cache.expanduser())
    profile = read_profile(records.parent, profile_subject(machine, choices)) if records else None
    if profile is None:
        raise ConfigError(
            f"There is no profile of {config.model} in {config.cache}; serve it once with --draft auto, in a budget "
            "that a quantized draft fits, which makes one."
        )
    return profile


def with_cell(situation: Situation, budget_bytes: int, bandwidth: float) -> Situation:
    config = situation.config.model_copy(update={"device_memory": budget_bytes})
    return situation._replace(config=config, bandwidth=bandwidth)
