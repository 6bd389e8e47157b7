"""What transformers makes of a checkpoint that it loads as a whole, to compare with what is loaded part by part."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.model.structure import experts_modules, fused_names


def load_whole(path: Path) -> PreTrainedModel:
    """In the types that transformers chooses. Needs all of the weights: what is missing it would make up."""
    model: PreTrainedModel
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    model, info = from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    model.eval()
    return model


def experts_of(model: PreTrainedModel) -> list[dict[str, torch.Tensor]]:
    """The fused weights of each layer's experts by name, [E, ...] each."""
    return [
        {name: parameter.detach() for name, parameter in module.named_parameters(recurse=False)}
        for _, module in experts_modules(model)
        if isinstance(module, torch.nn.Module)
    ]


def dense_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state dict without the experts; tied weights are there under each of their names."""
    fused = {name for names in fused_names(model) for name in names}
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in fused}


def assert_same_weights(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit, and of the same types."""
    assert actual.keys() == expected.keys()
    for name, weight in actual.items():
        assert weight.dtype is expected[name].dtype, name
        assert torch.equal(weight, expected[name]), name


def assert_dense_weights(parts: Iterable[dict[str, torch.Tensor]], model: PreTrainedModel) -> None:
    """The parts are the dense weights of the model, without those that are tied to one of them."""
    dense = dense_of(model)
    actual: dict[str, torch.Tensor] = {}
    for part in parts:
        assert not actual.keys() & part.keys()
        actual |= part
    assert_same_weights(actual, {name: dense[name] for name in actual})
    present = {dense[name].data_ptr() for name in actual}
    assert {name for name, weight in dense.items() if weight.data_ptr() not in present} == set()
