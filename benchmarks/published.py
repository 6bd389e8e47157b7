"""Models as they were published, of which there is nothing here but `config.json`, with made-up texts."""

from pathlib import Path

from benchmarks.cards import Card, Link, pass_times
from benchmarks.scenarios import Situation
from benchmarks.synthetic import Locality, synthesize
from engine.config import BenchConfig
from engine.description import ModelDescription, describe_model
from engine.planning import Machine
from engine.profile import Profile, ProfiledToken

CONFIGS = Path(__file__).parents[1] / "tests" / "fixtures" / "configs"
MODELS = ("Mixtral-8x7B", "Qwen3-30B-A3B", "Phi-3.5-MoE", "DeepSeek-V2-Lite")
MAX_MODEL_LEN = 8192
HOST_MEMORY = "1TB"
"""All experts fit."""


def describe(name: str, card: Card) -> tuple[BenchConfig, ModelDescription, Machine]:
    """The model with a card's memory for its budget, on a machine that is not here."""
    config = BenchConfig.model_validate(
        {
            "model": name,
            "max_model_len": MAX_MODEL_LEN,
            "draft": "auto",
            "device_memory": card.num_bytes,
            "host_memory": HOST_MEMORY,
        }
    )
    machine = Machine.with_absent_cuda()
    return config, describe_model(config, CONFIGS / name, machine.device), machine


def text(model: ModelDescription, locality: Locality, num_tokens: int) -> list[ProfiledToken]:
    experts_per_layer = [layer.num_experts for layer in model.sizes.layout.layers]
    return synthesize(experts_per_layer, model.skeleton.top_k, locality, num_tokens)


def situation(
    config: BenchConfig,
    model: ModelDescription,
    machine: Machine,
    tokens: list[ProfiledToken],
    card: Card,
    link: Link,
    warm_up_tokens: int,
) -> Situation:
    profile = Profile(tokens, pass_times(model, model.choices, card))
    return Situation(config, model, machine, profile, link.bandwidth, warm_up_tokens)
