"""Between a checkpoint in Hugging Face format and its parts: dense weights here, experts there."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.errors import ModelNotFoundError, PackError, UnsupportedModelError, first_line
from engine.model.causal_lm import CausalLM
from engine.model.dispatch import EXPERTS_IMPLEMENTATION, ExpertsModule

EXPERT_PARAMETERS = ("gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias")


def read_config(model_path: Path) -> PreTrainedConfig:
    """The model's configuration. Raises `ModelNotFoundError` where there is none that transformers knows."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model_path)
        return config
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ModelNotFoundError(
            f"{model_path} has no configuration that transformers can read ({first_line(error)})."
        ) from error


def load_whole(model_path: Path) -> PreTrainedModel:
    """The model as transformers loads it, in the checkpoint's own types, in host memory.

    Raises `ModelNotFoundError` where weights cannot be read, and `UnsupportedModelError` where some are missing, which
    transformers would make up at random.
    """
    try:
        model, info = cast(
            tuple[PreTrainedModel, dict[str, set[str]]],
            AutoModelForCausalLM.from_pretrained(model_path, dtype="auto", output_loading_info=True),
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelNotFoundError(
            f"{model_path} has no weights that transformers can load ({first_line(error)})."
        ) from error
    if info["missing_keys"]:
        raise _missing_weights(model, sorted(info["missing_keys"]))
    model.eval()
    return model


def load_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of one of the pack's files, in host memory. Raises `PackError` where it is damaged."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise PackError(
            f"{file} is damaged ({first_line(error)}); delete its directory to pack the model anew."
        ) from error


def main_dtype(weights: Iterable[torch.Tensor]) -> torch.dtype:
    """The type of most of the weights."""
    num_weights: Counter[torch.dtype] = Counter()
    for weight in weights:
        num_weights[weight.dtype] += weight.numel()
    return num_weights.most_common(1)[0][0]


def experts_modules(model: PreTrainedModel) -> list[tuple[str, ExpertsModule]]:
    """The experts modules by name, in order. Raises `UnsupportedModelError` where none goes through the dispatch."""
    found = [
        (name, cast(ExpertsModule, module))
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed") and hasattr(module, "has_post_expert_norm")
    ]
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no experts that go through transformers' experts dispatch; "
            "choose a mixture-of-experts model, or a newer transformers that dispatches this one."
        )
    return found


def expert_parameters(module: ExpertsModule) -> dict[str, torch.Tensor]:
    """The fused weights of a layer's experts by name, [E, ...] each."""
    found = {name: getattr(module, name, None) for name in EXPERT_PARAMETERS}
    return {name: parameter for name, parameter in found.items() if isinstance(parameter, nn.Parameter)}


def dense_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state dict without the experts' fused weights; tied weights appear once."""
    fused = {f"{name}.{key}" for name, module in experts_modules(model) for key in expert_parameters(module)}
    seen: set[int] = set()
    dense = {}
    for name, tensor in model.state_dict().items():
        if name not in fused and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            dense[name] = tensor
    return dense


def build_model(config: PreTrainedConfig, dense_file: Path, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """The model with its dense weights on the device; the experts' fused weights stay unallocated (meta).

    Weights of the checkpoint's main type are converted to `dtype`; those that transformers keeps in another one stay.
    """
    # Parameters on meta, buffers real: what is computed rather than stored (rotary frequencies) must not be lost.
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation=EXPERTS_IMPLEMENTATION)
    stored = load_tensors(dense_file)
    converted = main_dtype(stored.values())
    weights = {
        name: tensor.to(device, dtype if tensor.dtype == converted else tensor.dtype) for name, tensor in stored.items()
    }
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    _require_all_loaded(model)
    for _, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return CausalLM(model.eval(), [module for _, module in experts_modules(model)])


def _require_all_loaded(model: PreTrainedModel) -> None:
    fused = {id(parameter) for _, module in experts_modules(model) for parameter in expert_parameters(module).values()}
    missing = [name for name, weight in model.named_parameters() if weight.is_meta and id(weight) not in fused]
    if missing:
        raise _missing_weights(model, missing)


def _missing_weights(model: PreTrainedModel, names: list[str]) -> UnsupportedModelError:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return UnsupportedModelError(
        f"{type(model).__name__} needs weights that the checkpoint lacks: {', '.join(names[:5])}{more}."
    )
