"""One model, several implementations of its experts.

transformers routes the experts of every supported architecture through `ALL_EXPERTS_FUNCTIONS`; one entry there hands
each call on to whatever implementation is active at that moment: the quantized experts while drafting, the cached
full-precision ones while verifying.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

EXPERTS_IMPLEMENTATION = "specter"


class ExpertsModule(Protocol):
    """What transformers' experts modules say of themselves (`use_experts_implementation`), and what is added here."""

    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    act_fn: Callable[[torch.Tensor], torch.Tensor]
    post_expert_norm: Callable[[torch.Tensor], torch.Tensor]

    specter_layer: int
    specter_dispatch: "ExpertsDispatch"

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor: ...


class ExpertsImplementation(Protocol):
    """Computes what the experts of one layer contribute."""

    def __call__(
        self,
        module: ExpertsModule,
        layer: int,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """[T, H] from hidden states [T, H], and the experts [T, K] that the router chose with their weights [T, K].

        `module` is transformers' experts module, which says how an expert computes; its fused weights are not loaded.
        `layer` counts the mixture-of-experts layers.
        """


class ExpertsDispatch:
    """Switch between implementations, shared by the experts modules of one model. Mutable."""

    def __init__(self, modules: Sequence[ExpertsModule]) -> None:
        self._active: ExpertsImplementation | None = None
        for layer, module in enumerate(modules):
            module.specter_layer = layer
            module.specter_dispatch = self

    @contextmanager
    def using(self, implementation: ExpertsImplementation) -> Iterator[None]:
        """Within the block, the experts are computed by `implementation`."""
        self._active = implementation
        try:
            yield
        finally:
            self._active = None

    def forward(
        self, module: ExpertsModule, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        assert self._active is not None, "the model was called outside of `using`"
        return self._active(module, module.specter_layer, hidden_states, top_k_index, top_k_weights)


def _forward(
    module: ExpertsModule, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    return module.specter_dispatch.forward(module, hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, _forward)
