"""Turns the life of one request into metrics."""

import time
from collections.abc import Callable

from engine.protocol import CycleStats, Estimates
from server.metrics import Metrics


class RequestObserver:
    """Mutable; one per request, in the order arrival, `admitted`, `cycle` and `tokens`, `finished`."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._arrived = clock()
        self._queued = self._arrived
        self._admitted: float | None = None
        self._first: float | None = None
        self._last = self._arrived
        self._num_tokens = 0

    def queued(self) -> None:
        self._queued = self._clock()

    def admitted(self) -> None:
        self._admitted = self._clock()
        self._metrics.queue_time.observe(self._admitted - self._queued)

    def cycle(self, stats: CycleStats) -> None:
        self._metrics.cycle(stats)

    def estimates(self, estimates: Estimates) -> None:
        """What the last cycle's draft was decided by."""
        self._metrics.estimates(estimates)

    def tokens(self, num_tokens: int, num_prompt_tokens: int, max_model_len: int) -> None:
        """The engine emitted these tokens, as far as they are part of the output."""
        metrics, now = self._metrics, self._clock()
        if self._first is None:
            self._first = now
            metrics.prompt_tokens.inc(num_prompt_tokens)
            metrics.time_to_first_token.observe(now - self._arrived)
            metrics.prefill_time.observe(now - (self._admitted or now))
        else:
            metrics.inter_token_latency.observe(now - self._last)
        self._last = now
        self._num_tokens += num_tokens
        metrics.generation_tokens.inc(num_tokens)
        metrics.kv_cache_usage.set((num_prompt_tokens + self._num_tokens) / max_model_len)

    def finished(self, reason: str) -> None:
        metrics = self._metrics
        metrics.finished[reason].inc()
        metrics.e2e_latency.observe(self._clock() - self._arrived)
        if self._first is None:
            return
        metrics.kv_cache_usage.set(0)
        metrics.decode_time.observe(self._last - self._first)
        if self._num_tokens > 1:
            metrics.time_per_output_token.observe((self._last - self._first) / (self._num_tokens - 1))
