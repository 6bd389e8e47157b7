"""The one KV cache, which draft and verify share."""

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from engine.dtypes import dtype_name
from engine.errors import ConfigError, UnsupportedModelError

GROWTH_TOKENS = 512
"""Buffers grow by so many tokens at a time."""


class BufferedLayer(DynamicLayer):
    """transformers' layer for full attention, on buffers that grow in steps instead of a concatenation per token.

    `keys` and `values` [1, heads, tokens, head_dim] are views of the part of the buffers that is in use, in the type
    that they are stored in, so what else transformers does with a layer, dropping tokens above all, works on them as it
    is.
    """

    def __init__(self, max_tokens: int, dtype: torch.dtype | None = None) -> None:
        """The buffers do not grow beyond `max_tokens`, unless they have to. None stores states in their own type."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._max_tokens = max_tokens
        self._dtype = dtype
        self._key_buffer: torch.Tensor | None = None
        self._value_buffer: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the states [1, heads, new tokens, head_dim]; all keys and values, in the type of the new ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_kept = self.get_seq_length()
        num_tokens = num_kept + key_states.shape[-2]
        self._key_buffer = self._with_room(self._key_buffer, key_states, num_kept, num_tokens)
        self._value_buffer = self._with_room(self._value_buffer, value_states, num_kept, num_tokens)
        self._key_buffer[..., num_kept:num_tokens, :] = key_states
        self._value_buffer[..., num_kept:num_tokens, :] = value_states
        self.keys = self._key_buffer[..., :num_tokens, :]
        self.values = self._value_buffer[..., :num_tokens, :]
        # Of the same type these are the views themselves.
        return self.keys.to(key_states.dtype), self.values.to(value_states.dtype)

    def _with_room(
        self, buffer: torch.Tensor | None, states: torch.Tensor, num_kept: int, num_tokens: int
    ) -> torch.Tensor:
        if buffer is not None and num_tokens <= buffer.shape[-2]:
            return buffer
        step = -(-num_tokens // GROWTH_TOKENS) * GROWTH_TOKENS
        capacity = max(num_tokens, min(step, self._max_tokens))
        grown = states.new_empty((*states.shape[:-2], capacity, states.shape[-1]), dtype=self._dtype)
        if buffer is not None:
            grown[..., :num_kept, :] = buffer[..., :num_kept, :]
        return grown


class KvCache:
    """Keys and values of the tokens computed so far, for one sequence. Mutable: every forward pass appends to it."""

    def __init__(self, config: PreTrainedConfig, max_tokens: int, dtype: torch.dtype | None = None) -> None:
        """For up to `max_tokens` tokens, stored in `dtype`, or as they come where it is None.

        Raises `UnsupportedModelError` for caches that cannot drop their last tokens, and `ConfigError` for those that
        cannot be stored in another type.
        """
        self._cache = DynamicCache(config=config)
        self._cache.activate_past_recording()
        for index, layer in enumerate(self._cache.layers):
            if not layer.is_croppable:
                raise UnsupportedModelError(
                    f"{config.model_type} keeps its context in {type(layer).__name__}, which cannot drop rejected "
                    "tokens; models with such layers cannot be served yet."
                )
            if type(layer) is DynamicLayer:
                self._cache.layers[index] = BufferedLayer(max_tokens, dtype)
            elif dtype is not None:
                raise ConfigError(
                    f"kv_dtype is {dtype_name(dtype)}, but {config.model_type} keeps context in "
                    f"{type(layer).__name__}, which stores it as it was computed; leave --kv-dtype at auto."
                )

    @property
    def transformers_cache(self) -> DynamicCache:
        """What the model's forward pass takes as `cache`."""
        return self._cache

    @property
    def num_tokens(self) -> int:
        return int(self._cache.get_seq_length())

    @property
    def num_bytes(self) -> int:
        """Bytes of the tokens that it holds; its buffers may be larger."""
        states = [getattr(layer, name, None) for layer in self._cache.layers for name in ("keys", "values")]
        return sum(state.nbytes for state in states if isinstance(state, torch.Tensor))

    def drop(self, num_tokens: int) -> None:
        """Forget the last tokens. Call it after every pass: even with 0 it frees what left a sliding window."""
        self._cache.crop(-num_tokens)
