"""transformers' model without its experts: everything that exists once and in full precision."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from engine.model.dispatch import ExpertsDispatch, ExpertsImplementation, ExpertsModule
from engine.model.kv_cache import KvCache
from engine.model.routers import NextRouters, find_routers


class CausalLM:
    """Runs the model for one sequence, with the implementation of the experts that the caller brings."""

    def __init__(
        self,
        model: PreTrainedModel,
        experts_modules: Sequence[ExpertsModule],
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Keys and values are stored in `kv_dtype`, or as they are computed where it is None."""
        self._model = model
        self._kv_dtype = kv_dtype
        self._device = next(parameter.device for parameter in model.parameters() if not parameter.is_meta)
        self._dispatch = ExpertsDispatch(experts_modules)

    @property
    def config(self) -> PreTrainedConfig:
        return self._model.config

    @property
    def num_bytes(self) -> int:
        """Device memory of the dense weights; tied ones count once."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors if not tensor.is_meta}.values())

    def routers(self, top_k: int) -> NextRouters | None:
        """Those of all layers, to ask ahead of time; None where they cannot be told."""
        found = find_routers(self._model)
        return NextRouters(found, top_k) if found else None

    def new_cache(self, max_tokens: int) -> KvCache:
        return KvCache(self.config, max_tokens, self._kv_dtype)

    @torch.inference_mode()
    def forward(
        self, token_ids: list[int], cache: KvCache, experts: ExpertsImplementation, num_logits: int = 1
    ) -> torch.Tensor:
        """Append the tokens to the cache; logits float32 [num_logits, V] after the last `num_logits` of them."""
        inputs = torch.tensor([token_ids], device=self._device)
        with self._dispatch.using(experts):
            output = self._model(
                input_ids=inputs,
                cache=cache.transformers_cache,
                use_cache=True,
                logits_to_keep=num_logits,
            )
        logits: torch.Tensor = output.logits[0]
        return logits.float()
