"""Serves requests one after the other, with one pass over the whole model per token."""

import time
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from engine.protocol import CycleStats, Prefill, Tokens
from engine.request import Request
from engine.serial_core import SerialCore


class PassCore(SerialCore):
    """What `engine.process.serve` drives."""

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        pass_bytes: int,
    ) -> None:
        """`device` is where the model takes its token ids; `pass_bytes` of weights are loaded by each pass."""
        super().__init__(max_model_len, vocab_size, eos_token_ids)
        self._model: Any = model
        self._device = device
        self._pass_bytes = pass_bytes
        self._cache: DynamicCache | None = None

    def advance(self, request: Request) -> None:
        """One pass, over the prompt or the last token, and one token from it."""
        token_id, stats = self._pass(request)
        if not request.output_token_ids:
            num_tokens = len(request.prompt_token_ids)
            self.send(Prefill(request.request_id, num_tokens, num_tokens, stats))
            stats = CycleStats()
        self.send(Tokens(request.request_id, request.append([token_id]), stats))

    def release(self, request: Request) -> None:
        self._cache = None

    def _pass(self, request: Request) -> tuple[int, CycleStats]:
        started = time.perf_counter()
        if self._cache is None:
            self._cache = DynamicCache(config=self._model.config)
        # As transformers' `generate` does it.
        with torch.no_grad():
            output = self._model(
                input_ids=torch.tensor(
                    [request.output_token_ids[-1:] or request.prompt_token_ids], device=self._device
                ),
                cache=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
            token_id = request.choose(output.logits[0, -1].float()).token_id
        stats = CycleStats(verify_seconds=time.perf_counter() - started, demand_bytes=self._pass_bytes)
        return token_id, stats
