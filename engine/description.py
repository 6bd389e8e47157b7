"""What a model is, and how the settings say that it should be served; from its configuration, without its weights."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from engine.config import MAX_AUTO_DRAFT_LENGTH, DraftWeights, EngineConfig
from engine.dtypes import torch_dtype
from engine.errors import ConfigError, UnsupportedModelError
from engine.kernels.quantization import QuantizationSpec, require_fitting
from engine.model.checkpoint import read_config
from engine.model.kv_cache import KvCache
from engine.model.meta_pass import PassMemory, measure_pass
from engine.model.skeleton import Skeleton, read_skeleton
from engine.model.weights import checkpoint_dtype
from engine.packing import is_pack, pack_dtype
from engine.sizing import Choices, ModelSizes

USUAL_CHUNK_TOKENS = 512
"""Prompt tokens per prefill step, where they are automatic, before it is known how much memory there is."""


class ModelDescription(NamedTuple):
    path: Path
    hf_config: PreTrainedConfig
    skeleton: Skeleton
    sizes: ModelSizes
    choices: Choices


def describe_model(config: EngineConfig, path: Path, device: torch.device) -> ModelDescription:
    """Of the model in the directory `path`, a checkpoint or a pack, to be computed on the device.

    Where the drafter is automatic, the choices are those of the quantized draft: what needs most. The length of prefill
    steps is then a usual one.
    Raises `ConfigError`, `ModelNotFoundError`, or `UnsupportedModelError` for what cannot be served.
    """
    hf_config = read_config(path)
    stored_dtype = pack_dtype(path) if is_pack(path) else checkpoint_dtype(hf_config, path)
    choices = _choices(config, hf_config, stored_dtype, device)
    _require_constant_rope(hf_config, choices.max_model_len)
    KvCache(hf_config, choices.max_model_len, choices.stored_kv_dtype)  # refuses what it cannot hold
    skeleton = read_skeleton(hf_config, stored_dtype)

    @cache
    def pass_memory(num_tokens: int) -> PassMemory:
        return measure_pass(skeleton.model, num_tokens, choices.max_model_len, on_cpu=device.type == "cpu")

    sizes = ModelSizes(skeleton, pass_memory, device)
    if choices.draft:
        for layer in sizes.layout.layers:
            require_fitting(choices.draft, layer.matrix_shapes.values())
    return ModelDescription(path, hf_config, skeleton, sizes, choices)


def _choices(
    config: EngineConfig, hf_config: PreTrainedConfig, stored_dtype: torch.dtype, device: torch.device
) -> Choices:
    dtype = compute_dtype(config, stored_dtype, device)
    weights: DraftWeights = "qint4" if config.draft_weights == "auto" else config.draft_weights
    draft_length = MAX_AUTO_DRAFT_LENGTH if config.draft_length == "auto" else config.draft_length
    drafter = "quantized" if config.draft == "auto" else config.draft
    if draft_length == 0 or drafter == "none":
        drafter, draft_length = "none", 0
    return Choices(
        max_model_len=context_length(config, hf_config),
        dtype=dtype,
        kv_dtype=dtype if config.kv_dtype == "auto" else torch_dtype(config.kv_dtype),
        drafter=drafter,
        draft=QuantizationSpec(weights, config.draft_group_size) if drafter == "quantized" else None,
        draft_length=draft_length,
        prefill_chunk_tokens=(
            USUAL_CHUNK_TOKENS if config.prefill_chunk_tokens == "auto" else config.prefill_chunk_tokens
        ),
    )


def compute_dtype(config: EngineConfig, stored_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type to compute in on the device, where the checkpoint's is `stored_dtype`."""
    if config.dtype != "auto":
        return torch_dtype(config.dtype)
    return torch.float32 if device.type == "cpu" else stored_dtype


def context_length(config: EngineConfig, hf_config: PreTrainedConfig) -> int:
    """The longest prompt plus output, in tokens. Raises `ConfigError` where the model cannot have what is set."""
    longest = int(hf_config.get_text_config().max_position_embeddings)
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise ConfigError(f"max_model_len is {config.max_model_len}, but the model's maximum is {longest}; lower it.")
    return config.max_model_len


def _require_constant_rope(hf_config: PreTrainedConfig, max_model_len: int) -> None:
    """Refuse contexts in which a token's rotary embedding depends on how many tokens share its pass.

    Beyond a length "longrope" takes other frequencies for the whole pass, so chunks of a prompt and passes over drafted
    tokens would see others than one pass over the prompt, or over one token.
    """
    text_config = hf_config.get_text_config()
    rope = getattr(text_config, "rope_parameters", None) or {}
    for parameters in (rope, *(by_layer_type for by_layer_type in rope.values() if isinstance(by_layer_type, dict))):
        if parameters.get("rope_type") != "longrope":
            continue
        # Phi-MoE's frequencies stay; only this scale would change.
        is_constant = "long_mscale" in parameters and parameters["long_mscale"] == parameters["short_mscale"]
        limit = int(parameters["original_max_position_embeddings"])
        if max_model_len > limit and not is_constant:
            raise UnsupportedModelError(
                f"{hf_config.model_type} changes its rotary embedding beyond {limit} tokens (longrope), which cannot "
                f"be served yet; pass --max-model-len {limit} or less (it is {max_model_len})."
            )
