"""How many bytes a model takes, from its skeleton and the settings. Pure arithmetic."""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch

from engine.config import DrafterName
from engine.experts.codec import IdentityCodec
from engine.experts.layout import ExpertLayout, LayerLayout
from engine.kernels.quantization import QuantizationSpec, stack_bytes
from engine.kernels.quantized_linear import DequantizingLinear, kernel_for
from engine.memory import MemoryNeeds
from engine.model.meta_pass import PassMemory
from engine.model.skeleton import Skeleton


class Choices(NamedTuple):
    """What the settings come to for one model."""

    max_model_len: int
    dtype: torch.dtype
    """What is computed in."""
    kv_dtype: torch.dtype
    drafter: DrafterName
    """Never "auto"."""
    draft: QuantizationSpec | None
    """Of the quantized experts, where these draft."""
    draft_length: int
    """Tokens per cycle at most."""
    prefill_chunk_tokens: int

    def with_finer_draft(self) -> "Choices":
        """With a quantized draft of 8 bits."""
        assert self.draft is not None
        return self._replace(draft=self.draft._replace(weights="qint8"))

    def without_draft(self) -> "Choices":
        """Decoding token by token."""
        return self._replace(drafter="none", draft=None, draft_length=0)

    def without_quantized_draft(self) -> "Choices":
        """Drafting with what takes no memory."""
        return self._replace(drafter="ngram" if self.draft_length else "none", draft=None)

    @property
    def stored_kv_dtype(self) -> torch.dtype | None:
        """The KV cache's type where it is another one than that of compute."""
        return None if self.kv_dtype is self.dtype else self.kv_dtype

    @property
    def max_pass_tokens(self) -> int:
        """Tokens of the longest pass: a chunk of a prompt, or the verification of a draft."""
        return max(self.prefill_chunk_tokens, self.draft_length + 1)


class ModelSizes:
    """One model's sizes on one device."""

    def __init__(self, skeleton: Skeleton, pass_memory: Callable[[int], PassMemory], device: torch.device) -> None:
        """`pass_memory(num_tokens)` is that of passes of up to so many tokens, in the checkpoint's type."""
        self._skeleton = skeleton
        self._pass_memory = pass_memory
        self._device = device
        self.layout = ExpertLayout(tuple(LayerLayout.of(*layer) for layer in skeleton.experts))

    @property
    def expert_bytes(self) -> int:
        return self.layout.expert_bytes

    @property
    def num_experts(self) -> int:
        return self.layout.num_experts

    def cold_token_bytes(self, top_k: int) -> int:
        """The experts that one token visits."""
        return sum(min(top_k, layer.num_experts) for layer in self.layout.layers) * self.expert_bytes

    def needs(self, choices: Choices) -> MemoryNeeds:
        """What the device must hold besides slots."""
        skeleton = self._skeleton
        kv_bytes = skeleton.kv_bytes(choices.max_model_len, choices.kv_dtype, choices.max_pass_tokens)
        return MemoryNeeds(
            dense=skeleton.dense_bytes(choices.dtype),
            draft=self.draft_bytes(choices.draft) if choices.draft else 0,
            kv_cache=kv_bytes,
            workspace=IdentityCodec.buffer_bytes(self.layout, choices.dtype) + self._activation_bytes(choices),
        )

    def draft_bytes(self, spec: QuantizationSpec) -> int:
        """The quantized experts on the device."""
        return sum(
            kernel_for(spec, shape, self._device).device_bytes(spec, layer.num_experts, shape, self.layout.dtype)
            for layer in self.layout.layers
            for shape in layer.matrix_shapes.values()
        ) + sum(map(_bias_bytes, self.layout.layers))

    def draft_file_bytes(self, spec: QuantizationSpec) -> int:
        """The quantized experts on the disk."""
        return sum(
            stack_bytes(spec, layer.num_experts, shape, self.layout.dtype)
            for layer in self.layout.layers
            for shape in layer.matrix_shapes.values()
        ) + sum(map(_bias_bytes, self.layout.layers))

    def pack_bytes(self, spec: QuantizationSpec | None) -> int:
        """The packed model on the disk."""
        draft = self.draft_file_bytes(spec) if spec else 0
        return self._skeleton.stored_bytes(self._skeleton.dtype) + self.num_experts * self.expert_bytes + draft

    @property
    def has_convertible_kv(self) -> bool:
        """Whether the KV cache can be stored in another type than that of compute."""
        return all(layer.is_convertible for layer in self._skeleton.kv_layers)

    def has_slow_draft(self, spec: QuantizationSpec) -> bool:
        """Whether some weights of the draft have no fast kernel on the device."""
        shapes = {shape for layer in self.layout.layers for shape in layer.matrix_shapes.values()}
        return any(kernel_for(spec, shape, self._device) is DequantizingLinear for shape in shapes)

    def quantized_share(self) -> float:
        """Share of all parameters that a draft quantizes."""
        num_quantized = sum(
            layer.num_experts * sum(shape.numel() for shape in layer.matrix_shapes.values())
            for layer in self.layout.layers
        )
        num_biases = sum(_bias_bytes(layer) for layer in self.layout.layers) // self.layout.dtype.itemsize
        return num_quantized / (num_quantized + num_biases + self._skeleton.num_dense_parameters)

    def _activation_bytes(self, choices: Choices) -> int:
        """An estimate of what a pass needs for a while."""
        skeleton = self._skeleton
        # Wider types take more. What a model computes in float32 anyway is then counted twice, to be on the safe side.
        widening = max(1, choices.dtype.itemsize // skeleton.dtype.itemsize)
        activations = widening * self._pass_memory(choices.max_pass_tokens).at(choices.max_model_len)
        logits = 4 * (choices.draft_length + 1) * skeleton.vocab_size * torch.float32.itemsize
        # A layer's KV buffers exist twice, one after the other, while they grow; converted ones while they are used.
        kv_layer = choices.max_model_len * max(layer.num_elements for layer in skeleton.kv_layers)
        converted = 0 if choices.kv_dtype is choices.dtype else kv_layer * choices.dtype.itemsize
        return activations + logits + kv_layer * choices.kv_dtype.itemsize // 2 + converted


def _bias_bytes(layer: LayerLayout) -> int:
    matrices = layer.matrix_shapes
    biases = [spec for spec in layer.tensors if spec.name not in matrices]
    return layer.num_experts * sum(prod(spec.shape) * spec.torch_dtype.itemsize for spec in biases)
