"""From a configuration to a model on the device: everything but the slots."""

from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedConfig

from engine.config import DEMO_MODEL, EngineConfig
from engine.demo import build_demo
from engine.device import Device
from engine.errors import ConfigError, UnsupportedModelError
from engine.experts.codec import IdentityCodec
from engine.experts.layout import ExpertLayout, LayerLayout
from engine.kernels.quantization import QuantizationSpec, QuantizedStack
from engine.kernels.quantized_linear import DequantizingLinear, QuantizedLinear, quantized_linear
from engine.model.causal_lm import CausalLM
from engine.model.checkpoint import build_model, load_tensors, read_config
from engine.model.kv_cache import KvCache
from engine.model.probe import ModelProbe, probe_model
from engine.model.resolve import resolve_model
from engine.packing import Pack, ensure_draft, ensure_pack
from engine.protocol import Loading, OnProgress
from engine.speculative.draft import QuantizedExperts, QuantizedLayer


class LoadedModel(NamedTuple):
    path: Path
    pack: Pack
    dtype: torch.dtype
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    model: CausalLM
    draft: QuantizedExperts | None
    codec: IdentityCodec
    probe: ModelProbe
    decisions: list[str]


def prepare_model(config: EngineConfig, on_progress: OnProgress) -> Path:
    """The model's directory; the demo is built and a hub id downloaded if need be. Raises `ModelNotFoundError`."""
    cache = config.cache.expanduser()
    if config.model == DEMO_MODEL:
        return build_demo(cache, on_progress)
    return resolve_model(config.model, cache, on_progress)


def load_model(config: EngineConfig, device: Device, on_progress: OnProgress) -> LoadedModel:
    """Pack the model if it is not packed yet, and load dense weights and draft. Raises `SpecterError`."""
    path = prepare_model(config, on_progress)
    hf_config = read_config(path)
    max_model_len = _context_length(config, hf_config)
    KvCache(hf_config, max_model_len)  # refuses a model that cannot be served before any long work
    _require_constant_rope(hf_config, max_model_len)
    pack = ensure_pack(path, config.cache.expanduser(), on_progress)
    dtype, decision = _compute_dtype(config, pack.layout, device)
    decisions = [f"Computing on {device.describe()} in {decision}."]

    draft = None
    spec = QuantizationSpec(config.draft_weights, config.draft_group_size)
    if config.draft and config.draft_length:
        draft = _load_draft(ensure_draft(pack, spec, on_progress), pack.layout, spec, device, on_progress)
    on_progress(Loading("Loading dense weights", 0, 0))
    model = build_model(hf_config, pack.dense_file, dtype, device.torch_device)
    decisions.append(_describe_draft(draft, config.draft_length, spec, model, pack.layout))
    return LoadedModel(
        path=path,
        pack=pack,
        dtype=dtype,
        max_model_len=max_model_len,
        vocab_size=hf_config.get_text_config().vocab_size,
        eos_token_ids=_eos_token_ids(path, hf_config),
        model=model,
        draft=draft,
        codec=IdentityCodec(pack.layout, dtype, device.torch_device),
        probe=probe_model(model),
        decisions=decisions,
    )


def _context_length(config: EngineConfig, hf_config: PreTrainedConfig) -> int:
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


def _compute_dtype(config: EngineConfig, layout: ExpertLayout, device: Device) -> tuple[torch.dtype, str]:
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype, f"{config.dtype}, as set"
    if device.kind == "cpu":
        return torch.float32, "float32, which is faster and more exact on a CPU than the checkpoint's type"
    dtype = layout.layers[0].tensors[0].torch_dtype
    return dtype, f"{str(dtype).removeprefix('torch.')}, the checkpoint's type"


def _eos_token_ids(path: Path, hf_config: PreTrainedConfig) -> frozenset[int]:
    try:
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # the file is optional
        ids = None
    if ids is None:
        ids = hf_config.get_text_config().eos_token_id
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def _load_draft(
    file: Path, layout: ExpertLayout, spec: QuantizationSpec, device: Device, on_progress: OnProgress
) -> QuantizedExperts:
    tensors = load_tensors(file)
    layers = []
    for index, layer in enumerate(layout.layers):
        on_progress(Loading("Loading draft experts", index, len(layout.layers)))
        projections: dict[str, QuantizedLinear] = {}
        biases = {}
        for tensor in layer.tensors:
            key = f"{index}.{tensor.name}"
            if tensor.name.endswith("_bias"):
                biases[tensor.name] = tensors.pop(key).to(device.torch_device)
                continue
            stack = QuantizedStack(*(tensors.pop(f"{key}.{part}") for part in QuantizedStack._fields))
            shape = torch.Size(reversed(tensor.shape) if layer.is_transposed else tensor.shape)
            projections[tensor.name] = quantized_linear(stack, spec, shape, device.torch_device)
        layers.append(QuantizedLayer(projections, biases))
    on_progress(Loading("Loading draft experts", len(layout.layers), len(layout.layers)))
    return QuantizedExperts(layers)


def _describe_draft(
    draft: QuantizedExperts | None, draft_length: int, spec: QuantizationSpec, model: CausalLM, layout: ExpertLayout
) -> str:
    if draft is None:
        return "No draft: every token is decoded by itself."
    num_quantized = sum(layer.num_experts * _num_matrix_weights(layer) for layer in layout.layers)
    share = num_quantized / (num_quantized + model.num_parameters)
    sentence = f"Drafting {draft_length} tokens per cycle with {spec} experts: {share:.1%} of all parameters quantized"
    linears = [linear for layer in draft.layers for linear in layer.projections.values()]
    slow = any(isinstance(linear, DequantizingLinear) for linear in linears)
    return f"{sentence}; no fast kernel here, so weights are dequantized on each use." if slow else f"{sentence}."


def _num_matrix_weights(layer: LayerLayout) -> int:
    return sum(prod(tensor.shape) for tensor in layer.tensors if not tensor.name.endswith("_bias"))
