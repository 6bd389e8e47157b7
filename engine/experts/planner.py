"""Which experts a pass will visit, as far as that can be told, and what has to make room for them: pure functions."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

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


class TransferPlan(NamedTuple):
    ranks: dict[ExpertId, int]
    """The experts that the pass will visit, in order, each with its place in it."""
    expendable: list[ExpertId]
    """Those of them that are resident, and yet have to go: what is visited last goes first."""


def plan_transfers(
    predicted: Sequence[ExpertId], is_resident: Callable[[ExpertId], bool], num_slots: int, num_spare: int
) -> TransferPlan:
    """Plan for a pass that visits the predicted experts, layer by layer, with `num_slots` slots.

    `num_spare` slots hold nothing that is predicted. Once a layer has been visited its slots are spare too. Where the
    spare ones do not do for a layer's missing experts, those give way that are visited last (Belady 1966), and will be
    moved again: as few as possible, and none that is visited before what takes its slot.
    """
    ranks = {expert: rank for rank, expert in enumerate(predicted)}
    resident = [expert for expert in ranks if is_resident(expert)]
    missing = ranks.keys() - set(resident)
    expendable: list[ExpertId] = []
    for layer, group in groupby(ranks, key=lambda expert: expert.layer):
        experts = list(group)
        num_missing = sum(expert in missing for expert in experts)
        while num_missing > num_spare and resident and resident[-1].layer > layer:
            expendable.append(resident.pop())
            missing.add(expendable[-1])
            num_spare += 1
        num_spare = min(num_slots, max(0, num_spare - num_missing) + len(experts))
    return TransferPlan(ranks, expendable)


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
