"""What can be learned from one pass through the model without its experts."""

from typing import NamedTuple

import torch

from engine.model.causal_lm import CausalLM
from engine.model.dispatch import ExpertsModule

NUM_PROBE_TOKENS = 16


class ModelProbe(NamedTuple):
    kv_bytes_per_token: int
    top_k: int
    """Experts per token and layer; the most, where layers differ."""


def probe_model(model: CausalLM) -> ModelProbe:
    """Run a few tokens with experts that contribute nothing, and look at the cache and the routes."""
    top_ks: list[int] = []

    def no_experts(
        module: ExpertsModule,
        layer: int,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        top_ks.append(top_k_index.shape[1])
        return torch.zeros_like(hidden_states)

    cache = model.new_cache(NUM_PROBE_TOKENS)
    model.forward([0] * NUM_PROBE_TOKENS, cache, no_experts)
    return ModelProbe(-(-cache.num_bytes // NUM_PROBE_TOKENS), max(top_ks))
