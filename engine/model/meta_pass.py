"""Passes through a model on torch's meta device, where nothing is computed: what they show, and the memory they take.

Every storage that appears within the pass is counted until nobody holds it any more. Attention counts as a fused kernel
does, without the scores; but where there is none for it (values of another size than the keys, on a CPU), and where the
model computes it by itself, with them.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from engine.model.dispatch import ExpertsDispatch, ExpertsModule
from engine.model.expert_math import expert_forward
from engine.model.kv_cache import KvCache
from engine.model.structure import experts_modules, fused_experts


class PassMemory(NamedTuple):
    """Grows evenly with the context."""

    least_context: int
    least_bytes: int
    bytes_per_token: float

    def at(self, num_tokens: int) -> int:
        """Bytes of a pass that ends a context of so many tokens."""
        return self.least_bytes + int(self.bytes_per_token * max(0, num_tokens - self.least_context))


NUM_MEASURED_LAYERS = 8
"""A pass frees what a layer took before the next one, and kinds of layers alternate within fewer than this."""


class _Enough(Exception):
    """Ends a pass early."""


class MetaPass:
    """Runs a model on meta with experts that take the memory of real ones, in the worst case: all tokens in one."""

    def __init__(
        self, model: PreTrainedModel, max_layers: int | None = None, end_layer: Callable[[], None] = lambda: None
    ) -> None:
        """A pass ends with the experts of so many layers, where that is set; `end_layer` is called after each."""
        self._model = model
        self._max_layers = max_layers
        self._end_layer = end_layer
        self._dispatch = ExpertsDispatch([module for _, module in experts_modules(model)])
        self._experts = fused_experts(model)
        self.top_k = 0
        """Experts per token and layer; the most, where layers differ."""

    def __call__(self, cache: KvCache, num_tokens: int) -> None:
        zero_scalars = _ZeroScalars()  # type: ignore[no-untyped-call]
        inputs = torch.zeros(1, num_tokens, dtype=torch.long, device="meta")
        # Not in inference mode, where composite operators that read a number arrive as a whole.
        with suppress(_Enough), torch.no_grad(), zero_scalars, self._dispatch.using(self._compute):
            self._model(input_ids=inputs, cache=cache.transformers_cache, use_cache=True, logits_to_keep=1)

    def _compute(
        self,
        module: ExpertsModule,
        layer: int,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        self.top_k = max(self.top_k, top_k_index.shape[1])
        parameters, is_transposed = self._experts[layer]

        def linear(name: str, inputs: torch.Tensor) -> torch.Tensor:
            return inputs.new_empty(len(inputs), parameters[name].shape[-1 if is_transposed else -2])

        outputs = hidden_states.new_empty(top_k_index.numel(), hidden_states.shape[1])
        expert_forward(module, linear, hidden_states)
        combined = (outputs.view(*top_k_weights.shape, -1) * top_k_weights.unsqueeze(-1)).sum(dim=1)
        self._end_layer()
        if layer + 1 == self._max_layers:
            raise _Enough
        return combined.to(outputs.dtype)


def measure_pass(model: PreTrainedModel, num_tokens: int, max_context: int, *, on_cpu: bool) -> PassMemory:
    """Of passes of up to `num_tokens` that end contexts of up to `max_context`."""
    num_tokens = min(num_tokens, max_context)
    shortest = _peak_bytes(model, num_tokens, num_tokens, on_cpu)
    if max_context == num_tokens:
        return PassMemory(num_tokens, shortest, 0.0)
    longest = _peak_bytes(model, num_tokens, max_context, on_cpu)
    return PassMemory(num_tokens, shortest, max(0, longest - shortest) / (max_context - num_tokens))


def _peak_bytes(model: PreTrainedModel, num_tokens: int, context: int, on_cpu: bool) -> int:
    cache = KvCache(model.config, context)
    storages = _LiveStorages()
    peaks: list[int] = []

    def end_layer() -> None:
        # Some layers of the cache make their states anew in each pass, which are counted as the cache's.
        peaks.append(storages.take_peak() - storages.live_bytes(_states(cache)))

    with _FusedAttention(on_cpu):
        MetaPass(model, NUM_MEASURED_LAYERS)(cache, context)
        # Which leaves the cache's own buffers as large as they have to be.
        for layer in cache.transformers_cache.layers:
            if getattr(layer, "is_initialized", False):
                layer.crop(-num_tokens)  # type: ignore[union-attr]
        with storages:
            MetaPass(model, NUM_MEASURED_LAYERS, end_layer)(cache, num_tokens)
            end_layer()
    return max(peaks)


def _states(cache: KvCache) -> list[torch.Tensor]:
    states = [getattr(layer, name, None) for layer in cache.transformers_cache.layers for name in ("keys", "values")]
    return [state for state in states if isinstance(state, torch.Tensor)]


class _ZeroScalars(TorchDispatchMode):
    """Answers 0 where a model reads a number out of a tensor, which without data would be an error.

    Rotary embeddings do, to find contexts beyond a length; whatever they choose, its size is the same.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return 0 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))


class _FusedAttention(TorchFunctionMode):
    """Answers torch's attention with its result alone, as its fused kernels do; on meta it would compute the scores."""

    def __init__(self, on_cpu: bool) -> None:
        super().__init__()
        self._on_cpu = on_cpu

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is scaled_dot_product_attention:
            query, value = args[0], args[2]
            if query.shape[-1] == value.shape[-1] or not self._on_cpu:
                return query.new_empty(*query.shape[:-1], value.shape[-1])
        return func(*args, **(kwargs or {}))


class _LiveStorages(TorchDispatchMode):
    """Counts the bytes of what comes out of operators for the first time, for as long as it lives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, int] = {}
        self._num_bytes: int = 0
        self._peak_bytes: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {_key(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _key(tensor) not in known | self._live.keys():
                self._add(tensor.untyped_storage())
        return result

    def take_peak(self) -> int:
        """The most bytes that were alive since the last call."""
        peak_bytes, self._peak_bytes = self._peak_bytes, self._num_bytes
        return peak_bytes

    def live_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of those of the tensors that are counted now."""
        return sum(self._live.get(key, 0) for key in {_key(tensor) for tensor in tensors})

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._live[key] = storage.nbytes()
        self._num_bytes += storage.nbytes()
        self._peak_bytes = max(self._peak_bytes, self._num_bytes)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self._num_bytes -= self._live.pop(key)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
