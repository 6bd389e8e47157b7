"""What the routers of the next layers would choose now: a guess at the experts that a pass will visit.

The residual stream changes little from layer to layer, so a router applied to the hidden states of an earlier layer
mostly names the experts that it will name in its turn (Eliseev and Mazur 2023, section 3.2).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.model.structure import expert_parameters, experts_modules


class Router(NamedTuple):
    """The linear part of a layer's router; what else it does changes the order of its experts little or not at all."""

    weight: torch.Tensor
    """[E, H]"""
    bias: torch.Tensor | None
    """[E]"""


def find_routers(model: PreTrainedModel) -> list[Router] | None:
    """Those of all mixture-of-experts layers, in order; None where some layer has none to see."""
    hidden_size = int(model.config.get_text_config().hidden_size)
    routers = []
    for name, experts in experts_modules(model):
        num_experts = next(iter(expert_parameters(experts).values())).shape[0]
        block = model.get_submodule(name.rpartition(".")[0])
        router = _router_of(block, experts, num_experts, hidden_size)
        if router is None:
            return None
        routers.append(router)
    return routers


def _router_of(block: nn.Module, experts: object, num_experts: int, hidden_size: int) -> Router | None:
    """Of the module that calls the experts, whose own biases may look like a router."""
    found = [
        (module, parameter)
        for module in block.modules()
        if module is not experts
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.shape == (num_experts, hidden_size)
    ]
    if len(found) != 1:
        return None
    module, weight = found[0]
    bias = getattr(module, "bias", None)
    has_bias = isinstance(bias, torch.Tensor) and bias.shape == (num_experts,)
    return Router(weight, bias if has_bias else None)


class NextRouters:
    """The routers of all layers."""

    def __init__(self, routers: Sequence[Router], top_k: int) -> None:
        self._routers = routers
        self._top_k = top_k

    @property
    def num_layers(self) -> int:
        return len(self._routers)

    def choices(self, layer: int, ahead: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """Experts int64 [T, K] that the router `ahead` layers on would choose for `layer`'s hidden states [T, H].

        The best one first.
        """
        weight, bias = self._routers[layer + ahead]
        logits = torch.nn.functional.linear(hidden_states.to(weight.dtype), weight, bias)
        return logits.topk(min(self._top_k, logits.shape[-1]), dim=-1).indices
