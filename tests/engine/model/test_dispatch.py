from types import SimpleNamespace
from typing import cast

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.model.dispatch import EXPERTS_IMPLEMENTATION, ExpertsDispatch, ExpertsModule

HIDDEN = torch.ones(2, 4)
INDEX = torch.zeros(2, 1, dtype=torch.int64)
WEIGHTS = torch.ones(2, 1)


def make_modules(num_layers: int) -> list[ExpertsModule]:
    return [cast(ExpertsModule, SimpleNamespace(name=f"layer {layer}")) for layer in range(num_layers)]


def call(module: ExpertsModule) -> torch.Tensor:
    """As transformers calls it."""
    outputs: torch.Tensor = ALL_EXPERTS_FUNCTIONS[EXPERTS_IMPLEMENTATION](module, HIDDEN, INDEX, WEIGHTS)
    return outputs


class Recorder:
    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.calls: list[tuple[object, int]] = []

    def __call__(
        self,
        module: ExpertsModule,
        layer: int,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        assert top_k_index is INDEX
        assert top_k_weights is WEIGHTS
        self.calls.append((module, layer))
        return hidden_states * self.factor


def test_calls_reach_the_active_implementation_with_their_layer() -> None:
    modules = make_modules(3)
    dispatch = ExpertsDispatch(modules)
    recorder = Recorder(factor=2.0)
    with dispatch.using(recorder):
        outputs = [call(module) for module in reversed(modules)]
    assert recorder.calls == [(modules[2], 2), (modules[1], 1), (modules[0], 0)]
    assert all(torch.equal(output, 2 * HIDDEN) for output in outputs)


def test_implementations_take_turns() -> None:
    (module,) = make_modules(1)
    dispatch = ExpertsDispatch([module])
    draft, target = Recorder(), Recorder()
    for implementation in (draft, target, draft):
        with dispatch.using(implementation):
            call(module)
    assert (len(draft.calls), len(target.calls)) == (2, 1)


def test_outside_of_using_nothing_is_computed() -> None:
    (module,) = make_modules(1)
    dispatch = ExpertsDispatch([module])
    with pytest.raises(AssertionError, match="outside of `using`"):
        call(module)
    with dispatch.using(Recorder()):
        pass
    with pytest.raises(AssertionError, match="outside of `using`"):
        call(module)


def test_an_error_inside_ends_the_use() -> None:
    (module,) = make_modules(1)
    dispatch = ExpertsDispatch([module])
    with pytest.raises(KeyError), dispatch.using(Recorder()):
        raise KeyError
    with pytest.raises(AssertionError):
        call(module)


def test_two_models_have_nothing_to_do_with_each_other() -> None:
    (one,), (other,) = make_modules(1), make_modules(1)
    dispatch, _ = ExpertsDispatch([one]), ExpertsDispatch([other])
    with dispatch.using(Recorder()):
        call(one)
        with pytest.raises(AssertionError):
            call(other)
