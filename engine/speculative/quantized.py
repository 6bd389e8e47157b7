"""The draft's side of the model: quantized experts, which are all on the device."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from engine.device import Device, HostCopy
from engine.experts.planner import Routes
from engine.kernels.quantized_linear import QuantizedLinear
from engine.model.dispatch import ExpertsModule
from engine.model.expert_math import RoutedTokens, expert_forward


class QuantizedLayer(NamedTuple):
    projections: Mapping[str, QuantizedLinear]
    """By the parameter's name."""
    biases: Mapping[str, torch.Tensor]
    """[E, out] by the name of the bias; empty where the experts have none."""


class PendingRoutes(NamedTuple):
    """The routes of one pass on their way to the host."""

    shapes: Sequence[torch.Size]
    """(T, K) per layer."""
    copy: HostCopy
    """The layers one after the other, [L * T * K], whatever their K: one copy per pass."""

    def read(self) -> Routes:
        """Blocks the calling thread until they have arrived, that is until the pass is over."""
        layers = self.copy.tensor().split([shape.numel() for shape in self.shapes])
        return [experts.view(shape) for experts, shape in zip(layers, self.shapes, strict=True)]


class QuantizedExperts:
    """Experts implementation of the draft. Records the routes of each pass until they are taken."""

    def __init__(self, layers: Sequence[QuantizedLayer], device: Device) -> None:
        self.layers = layers
        self._device = device
        self._routes: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Device memory of the quantized experts."""
        return sum(
            sum(projection.num_bytes for projection in layer.projections.values())
            + sum(bias.nbytes for bias in layer.biases.values())
            for layer in self.layers
        )

    def __call__(
        self,
        module: ExpertsModule,
        layer: int,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        self._routes.append(top_k_index)
        projections, biases = self.layers[layer]
        routed = RoutedTokens(hidden_states, top_k_index)

        def linear(expert: int, name: str, inputs: torch.Tensor) -> torch.Tensor:
            outputs = projections[name](expert, inputs)
            bias = biases.get(f"{name}_bias")
            return outputs if bias is None else outputs + bias[expert]

        for expert in routed.experts:
            routed.compute(expert, partial(expert_forward, module, partial(linear, expert)))
        return routed.combine(top_k_weights)

    def take_routes(self) -> PendingRoutes:
        """The routes of the pass since the last call, which begin their way to the host. Returns at once."""
        routes, self._routes = self._routes, []
        flat = torch.cat([experts.flatten() for experts in routes])
        return PendingRoutes([experts.shape for experts in routes], self._device.to_host(flat))
