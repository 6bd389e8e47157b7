"""From the parts of a model to a model that runs: dense weights on the device, experts nowhere yet."""

from collections.abc import Iterable
from pathlib import Path

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from engine.errors import ModelNotFoundError, UnsupportedModelError, first_line
from engine.model.causal_lm import CausalLM
from engine.model.dispatch import EXPERTS_IMPLEMENTATION
from engine.model.structure import experts_modules, fused_names, missing_weights


def read_config(model_path: Path) -> PreTrainedConfig:
    """The model's configuration.

    Raises `ModelNotFoundError` where there is none that transformers knows, and `UnsupportedModelError` for quantized
    releases.
    """
    if not (model_path / "config.json").exists():
        raise ModelNotFoundError(f"{model_path} has no config.json; give a model's directory in Hugging Face format.")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model_path)
    except Exception as error:  # whatever transformers stumbles over in a file that has anything in it
        raise ModelNotFoundError(
            f"{model_path} has no configuration that transformers can read ({first_line(error)})."
        ) from error
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else type(quantization).__name__
        raise UnsupportedModelError(
            f"{model_path} is a quantized release ({method}), which cannot be packed yet; choose one in bfloat16, "
            "float16 or float32."
        )
    return config


def build_model(
    config: PreTrainedConfig,
    dense_parts: Iterable[dict[str, torch.Tensor]],
    *,
    stored_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> CausalLM:
    """The model with its dense weights on the device; the experts' fused weights stay unallocated (meta).

    `dense_parts` are pieces of its state dict. Weights of the checkpoint's type, `stored_dtype`, are converted to
    `dtype`; those that transformers keeps in another one stay. Raises `UnsupportedModelError` where some are missing.
    """
    # Parameters on meta, buffers real: what is computed rather than stored (rotary frequencies) must not be lost.
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation=EXPERTS_IMPLEMENTATION)
    missing = set(model.state_dict())
    for part in dense_parts:
        weights = {
            name: tensor.to(device, dtype if tensor.dtype is stored_dtype else tensor.dtype)
            for name, tensor in part.items()
        }
        model.load_state_dict(weights, strict=False, assign=True)
        missing -= weights.keys()
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    missing -= {name for names in fused_names(model) for name in names}
    if missing:
        raise missing_weights(model, missing)
    for _, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return CausalLM(model.eval(), [module for _, module in experts_modules(model)], kv_dtype)
