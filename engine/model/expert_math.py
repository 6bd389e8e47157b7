"""What an expert computes, and how tokens are grouped by expert; the same for every precision of the weights."""

from collections.abc import Callable

import torch

from engine.model.dispatch import ExpertsModule

Linear = Callable[[str, torch.Tensor], torch.Tensor]
"""`(parameter name, input [n, in]) -> [n, out]`, with the bias where the layer has one."""


def expert_forward(module: ExpertsModule, linear: Linear, hidden_states: torch.Tensor) -> torch.Tensor:
    """One expert on the tokens [n, H] that were routed to it, as `transformers.integrations.moe` defines it."""
    if module.has_gate:
        hidden = module._apply_gate(linear("gate_up_proj", hidden_states))
    else:
        hidden = module.act_fn(linear("up_proj", hidden_states))
    hidden = linear("down_proj", hidden)
    return module.post_expert_norm(hidden) if module.has_post_expert_norm else hidden


class RoutedTokens:
    """Tokens grouped by the experts that they are routed to. One layer of one pass; mutable while it is computed."""

    def __init__(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor) -> None:
        """`hidden_states` [T, H], `top_k_index` [T, K]; the index is read on the host."""
        self._hidden_states = hidden_states
        self._top_k = top_k_index.shape[1]
        self._pairs: dict[int, list[int]] = {}
        for pair, expert in enumerate(top_k_index.flatten().tolist()):
            self._pairs.setdefault(expert, []).append(pair)
        # Outputs are kept apart and summed at the end: the result does not depend on the order of the experts' arrival.
        self._outputs = hidden_states.new_empty(top_k_index.numel(), hidden_states.shape[1])  # [T * K, H]

    @property
    def rows(self) -> dict[int, list[int]]:
        """Which tokens each of the distinct experts is for."""
        return {expert: [pair // self._top_k for pair in pairs] for expert, pairs in self._pairs.items()}

    @property
    def experts(self) -> list[int]:
        """The distinct experts, by the first token that wants them."""
        return list(self._pairs)

    def compute(self, expert: int, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Run the expert, `forward` [n, H] -> [n, H], on its tokens."""
        pairs = self._pairs[expert]
        if len(pairs) == 1:
            pair = pairs[0]
            token = pair // self._top_k
            self._outputs[pair : pair + 1] = forward(self._hidden_states[token : token + 1])
            return
        index = torch.tensor(pairs, device=self._hidden_states.device)
        self._outputs[index] = forward(self._hidden_states[index // self._top_k])

    def combine(self, top_k_weights: torch.Tensor) -> torch.Tensor:
        """[T, H]: each token's expert outputs, weighted by [T, K] and summed."""
        outputs = self._outputs.view(*top_k_weights.shape, -1)  # [T, K, H]
        return (outputs * top_k_weights.unsqueeze(-1)).sum(dim=1).to(outputs.dtype)
