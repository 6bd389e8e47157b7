"""What a model's configuration alone says of its size: the model on torch's meta device, without any weights."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel

from engine.errors import UnsupportedModelError, first_line
from engine.model.dispatch import EXPERTS_IMPLEMENTATION
from engine.model.kv_cache import BufferedLayer, KvCache
from engine.model.meta_pass import MetaPass
from engine.model.structure import FusedExperts, dense_parameters, fused_experts

NUM_PROBE_TOKENS = 16


class KvLayer(NamedTuple):
    """The KV cache of one layer."""

    num_elements: int
    """Numbers per token, keys and values together."""
    max_tokens: int | None
    """Tokens that a sliding window spans; None where all are kept."""
    is_convertible: bool
    """Whether it can be stored in another type than that of compute."""


class Skeleton(NamedTuple):
    dtype: torch.dtype
    """The checkpoint's type."""
    num_dense_weights: dict[torch.dtype, int]
    """Dense weights, and buffers that checkpoints hold too, by the type that transformers keeps them in."""
    computed_bytes: int
    """Buffers that no checkpoint holds, such as rotary frequencies."""
    num_dense_parameters: int
    experts: Sequence[FusedExperts]
    """Per mixture-of-experts layer, without data."""
    kv_layers: Sequence[KvLayer]
    top_k: int
    """Experts per token and layer; the most, where layers differ."""
    vocab_size: int
    model: PreTrainedModel
    """On the meta device."""

    def stored_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the dense weights where those of the checkpoint's type are converted to `dtype`."""
        return sum(
            count * (dtype if kept is self.dtype else kept).itemsize for kept, count in self.num_dense_weights.items()
        )

    def dense_bytes(self, dtype: torch.dtype) -> int:
        """The same with all buffers: what the device holds."""
        return self.stored_bytes(dtype) + self.computed_bytes

    def kv_bytes(self, num_tokens: int, dtype: torch.dtype, pass_tokens: int) -> int:
        """Bytes of the KV cache for a context, computed in passes of up to `pass_tokens`.

        A sliding window keeps what the next token sees besides itself, and during a pass that pass's tokens too.
        """
        return dtype.itemsize * sum(
            layer.num_elements
            * (num_tokens if layer.max_tokens is None else min(num_tokens, layer.max_tokens - 1 + pass_tokens))
            for layer in self.kv_layers
        )


def meta_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' model with the experts dispatch, and neither weights nor buffers."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, experts_implementation=EXPERTS_IMPLEMENTATION
        )
    model.eval()
    return model


def read_skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> Skeleton:
    """Build the model without weights and run a few tokens through it. Raises `UnsupportedModelError`."""
    try:
        model = meta_model(config, dtype)
    except (ValueError, ImportError) as error:
        raise UnsupportedModelError(
            f"transformers cannot build a causal language model of the type {config.model_type} ({first_line(error)})."
        ) from error
    kv_layers, top_k = _probe(model)
    dense = dense_parameters(model)
    stored = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    counts: dict[torch.dtype, int] = {}
    for weight in [*dense, *(buffer for buffer in model.buffers() if id(buffer) in stored)]:
        counts[weight.dtype] = counts.get(weight.dtype, 0) + weight.numel()
    return Skeleton(
        dtype=dtype,
        num_dense_weights=counts,
        computed_bytes=sum(buffer.nbytes for buffer in model.buffers() if id(buffer) not in stored),
        num_dense_parameters=sum(parameter.numel() for parameter in dense),
        experts=fused_experts(model),
        kv_layers=kv_layers,
        top_k=top_k,
        vocab_size=int(config.get_text_config().vocab_size),
        model=model,
    )


def _probe(model: PreTrainedModel) -> tuple[list[KvLayer], int]:
    """A short pass, which shows the cache and the routes."""
    run = MetaPass(model)
    cache = KvCache(model.config, NUM_PROBE_TOKENS)
    run(cache, NUM_PROBE_TOKENS)
    return list(_kv_layers(cache.transformers_cache)), run.top_k


def _kv_layers(cache: DynamicCache) -> Iterable[KvLayer]:
    for layer in cache.layers:
        states = [getattr(layer, name, None) for name in ("keys", "values")]
        num_elements = sum(state.numel() for state in states if isinstance(state, torch.Tensor))
        max_tokens = getattr(layer, "sliding_window", None)
        yield KvLayer(-(-num_elements // NUM_PROBE_TOKENS), max_tokens, isinstance(layer, BufferedLayer))
