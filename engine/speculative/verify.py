"""The target's side: full-precision experts out of the cache, waited for one by one."""

from functools import partial

import torch
from torch.nn import functional

from engine.experts.codec import Codec
from engine.experts.transfer import ExpertTransfers
from engine.model.dispatch import ExpertsModule
from engine.model.expert_math import RoutedTokens, expert_forward
from engine.speculative.lookahead import RouterLookahead
from engine.trace import Tracer


class CachedExperts:
    """Experts implementation of prefill and verification: resident experts first, the others as they arrive."""

    def __init__(
        self, transfers: ExpertTransfers, codec: Codec, tracer: Tracer, lookahead: RouterLookahead | None = None
    ) -> None:
        """With a `lookahead`, each layer plans the transfers of the next ones; without, they are planned already."""
        self._transfers = transfers
        self._codec = codec
        self._tracer = tracer
        self._lookahead = lookahead

    def __call__(
        self,
        module: ExpertsModule,
        layer: int,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        routed = RoutedTokens(hidden_states, top_k_index)

        def compute(expert: int, record: torch.Tensor) -> None:
            weights = self._codec.decode(layer, record)

            def linear(name: str, inputs: torch.Tensor) -> torch.Tensor:
                return full_precision_linear(weights[name], weights.get(f"{name}_bias"), inputs, module.is_transposed)

            routed.compute(expert, partial(expert_forward, module, linear))

        predicted = self._lookahead.predict(layer, hidden_states) if self._lookahead else None
        with self._tracer.span("layer", "experts", layer=layer) as traced:
            self._transfers.visit(layer, routed.rows, len(hidden_states), compute, predicted)
            if self._tracer.is_on:
                traced["routes"] = top_k_index.tolist()
        return routed.combine(top_k_weights)


def full_precision_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, inputs: torch.Tensor, is_transposed: bool
) -> torch.Tensor:
    """[n, out] from [n, in]; the weight is [out, in], or [in, out] where it `is_transposed`."""
    return functional.linear(inputs, weight.T if is_transposed else weight, bias)
