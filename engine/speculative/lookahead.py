"""Prefetching without a draft: the next layers' routers say which experts they will probably want.

Wrong guesses cost little: what is not wanted in the end is given up between two pieces, and what is wanted goes first
(`TransferSchedule`). So the link is given every guess, and the nearest layer's first.
"""

from typing import Protocol

import torch

from engine.experts.layout import ExpertId

DEPTH = 2
"""Layers that are guessed ahead."""
MAX_TOKENS = 64
"""Longer passes are not guessed for: between them, their tokens want most of a layer."""


class Routers(Protocol):
    """Those of all layers; `engine.model.routers.NextRouters`, or what was recorded of them."""

    @property
    def num_layers(self) -> int: ...

    def choices(self, layer: int, ahead: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the router `ahead` layers behind `layer` would choose, [T, K]; see `NextRouters.choices`."""


class RouterLookahead:
    """Guesses for the pass that is under way."""

    def __init__(self, routers: Routers) -> None:
        self._routers = routers

    def predict(self, layer: int, hidden_states: torch.Tensor) -> list[ExpertId] | None:
        """The experts that the next layers will probably want, by layer, the most probable first.

        For a pass with hidden states [T, H] in `layer`; None where nothing is guessed, which is not to say that nothing
        is wanted.
        """
        if len(hidden_states) > MAX_TOKENS:
            return None
        targets = range(layer + 1, min(layer + DEPTH, self._routers.num_layers - 1) + 1)
        guessed: dict[ExpertId, None] = {}
        for target in targets:
            choices = self._routers.choices(layer, target - layer, hidden_states)
            # Every token's first choice, then every token's second one, ...
            guessed.update(dict.fromkeys(ExpertId(target, expert) for expert in choices.T.flatten().tolist()))
        return list(guessed)
