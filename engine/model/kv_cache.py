"""The one KV cache, which draft and verify share."""

import torch
from transformers import DynamicCache, PreTrainedConfig

from engine.errors import UnsupportedModelError


class KvCache:
    """Keys and values of the tokens computed so far, for one sequence. Mutable: every forward pass appends to it."""

    def __init__(self, config: PreTrainedConfig) -> None:
        """Raises `UnsupportedModelError` for caches that cannot drop their last tokens."""
        self._cache = DynamicCache(config=config)
        self._cache.activate_past_recording()
        for layer in self._cache.layers:
            if not layer.is_croppable:
                raise UnsupportedModelError(
                    f"{config.model_type} keeps its context in {type(layer).__name__}, which cannot drop rejected "
                    "tokens; models with such layers cannot be served yet."
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
        """Device memory in use."""
        states = [getattr(layer, name, None) for layer in self._cache.layers for name in ("keys", "values")]
        return sum(state.nbytes for state in states if isinstance(state, torch.Tensor))

    def drop(self, num_tokens: int) -> None:
        """Forget the last tokens. Call it after every pass: even with 0 it frees what left a sliding window."""
        self._cache.crop(-num_tokens)
