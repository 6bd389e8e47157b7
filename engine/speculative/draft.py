"""The draft's side: the same model with quantized experts, which are all on the device."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from engine.device import Device, HostCopy
from engine.experts.planner import LookaheadBuffer, Routes
from engine.experts.transfer import ExpertTransfers
from engine.kernels.quantized_linear import QuantizedLinear
from engine.model.causal_lm import CausalLM
from engine.model.dispatch import ExpertsModule
from engine.model.expert_math import RoutedTokens, expert_forward
from engine.model.kv_cache import KvCache
from engine.phases import PhaseClock


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


class Draft(NamedTuple):
    token_ids: list[int]
    probs: list[torch.Tensor]
    """What each token was drawn from, [V] each, as `choose` returned it."""


NO_DRAFT = Draft([], [])


class Drafter:
    """Proposes tokens, and plans the transfers that verifying them will need while it does."""

    def __init__(
        self, model: CausalLM, experts: QuantizedExperts, transfers: ExpertTransfers, clock: PhaseClock
    ) -> None:
        self._model = model
        self._experts = experts
        self._transfers = transfers
        self._clock = clock

    def propose(
        self,
        token_id: int,
        num_tokens: int,
        choose: Callable[[torch.Tensor], tuple[int, torch.Tensor]],
        cache: KvCache,
    ) -> Draft:
        """`num_tokens` tokens after `token_id`, the last verified one, which the cache does not hold yet.

        The cache is left as it was. The plan grows with every pass, so transfers overlap the draft; one pass more than
        there are tokens tells the routes of the last one.
        """
        draft = Draft([], [])
        lookahead = LookaheadBuffer()
        num_passes = num_tokens + 1 if num_tokens else 0
        with self._clock.phase("draft"):
            for _ in range(num_passes):
                logits = self._model.forward([token_id], cache, self._experts)
                pending = self._experts.take_routes()
                if len(draft.token_ids) < num_tokens:
                    token_id, probs = choose(logits[-1])
                    draft.token_ids.append(token_id)
                    draft.probs.append(probs)
                # Only now: choosing has waited for the pass anyway, and the routes have arrived meanwhile.
                routes = pending.read()
                with self._clock.phase("plan"):
                    lookahead.add(routes)
                    self._transfers.plan(lookahead.predicted())
            cache.drop(num_passes)
        return draft
