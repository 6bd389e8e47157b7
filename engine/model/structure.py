"""Which modules of transformers' model hold the experts, and which weights are dense."""

from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.errors import UnsupportedModelError
from engine.model.dispatch import ExpertsModule

EXPERT_PARAMETERS = ("gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias")


class FusedExperts(NamedTuple):
    """The experts of one layer, as transformers fuses them."""

    parameters: dict[str, torch.Tensor]
    """By name, [E, ...] each."""
    is_transposed: bool
    """Whether the matrices are [in, out] rather than [out, in]."""


def experts_modules(model: PreTrainedModel) -> list[tuple[str, ExpertsModule]]:
    """The experts modules by name, in order. Raises `UnsupportedModelError` where none goes through the dispatch."""
    found = [
        (name, cast(ExpertsModule, module))
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed") and hasattr(module, "has_post_expert_norm")
    ]
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no experts that go through transformers' experts dispatch; "
            "choose a mixture-of-experts model, or a newer transformers that dispatches this one."
        )
    return found


def expert_parameters(module: ExpertsModule) -> dict[str, torch.Tensor]:
    """The fused weights of a layer's experts by name, [E, ...] each."""
    found = {name: getattr(module, name, None) for name in EXPERT_PARAMETERS}
    return {name: parameter for name, parameter in found.items() if isinstance(parameter, nn.Parameter)}


def fused_experts(model: PreTrainedModel) -> list[FusedExperts]:
    """The experts of all layers, in order."""
    return [FusedExperts(expert_parameters(module), bool(module.is_transposed)) for _, module in experts_modules(model)]


def fused_names(model: PreTrainedModel) -> list[list[str]]:
    """The experts' entries of the state dict, layer by layer."""
    return [[f"{name}.{key}" for key in expert_parameters(module)] for name, module in experts_modules(model)]


def dense_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """All parameters but the experts'; tied ones once."""
    fused = {id(parameter) for layer in fused_experts(model) for parameter in layer.parameters.values()}
    return [parameter for parameter in model.parameters() if id(parameter) not in fused]


def missing_weights(model: PreTrainedModel, names: Iterable[str]) -> UnsupportedModelError:
    """The error for weights that transformers would make up at random."""
    shown = sorted(names)
    more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
    return UnsupportedModelError(
        f"{type(model).__name__} needs weights that the checkpoint lacks: {', '.join(shown[:5])}{more}."
    )
