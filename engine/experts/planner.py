"""What the draft's routes say about the experts that verification will visit."""

from collections.abc import Sequence

import torch

from engine.experts.layout import ExpertId, ExpertLayout

Routes = Sequence[torch.Tensor]
"""Per mixture-of-experts layer, in order: the experts of one pass, int64 [T, K] in host memory."""


class LookaheadBuffer:
    """The experts that the tokens drafted so far want (the paper's Expert Lookahead Buffer). Mutable, one per draft."""

    def __init__(self) -> None:
        self._wanted: list[dict[int, None]] = []

    def add(self, routes: Routes) -> None:
        """Take in the routes of one more draft pass."""
        while len(self._wanted) < len(routes):
            self._wanted.append({})
        for wanted, experts in zip(self._wanted, routes, strict=True):
            wanted.update(dict.fromkeys(experts.flatten().tolist()))

    def predicted(self) -> list[ExpertId]:
        """Experts in the order in which verification wants them: by layer, within it by the first token that does."""
        return [ExpertId(layer, expert) for layer, wanted in enumerate(self._wanted) for expert in wanted]


class PrefillPlanner:
    """Predicts the experts of a chunk of the prompt: with enough tokens, all of them."""

    MIN_SHARE = 0.9
    """Whole layers are streamed where at least this share of their experts is expected to be wanted."""

    def __init__(self, layout: ExpertLayout, top_k: int) -> None:
        self._layout = layout
        self._top_k = top_k

    def predicted(self, num_tokens: int) -> list[ExpertId]:
        """Experts by layer; none of a layer of which the tokens probably leave many out."""
        return [
            ExpertId(index, expert)
            for index, layer in enumerate(self._layout.layers)
            if expected_experts_share(num_tokens, layer.num_experts, self._top_k) >= self.MIN_SHARE
            for expert in range(layer.num_experts)
        ]


def expected_experts_share(num_tokens: int, num_experts: int, top_k: int) -> float:
    """Share of a layer's experts that some of the tokens want, were routing independent: `1 - (1 - K/E)^n`."""
    return 1.0 - (1.0 - top_k / num_experts) ** num_tokens
