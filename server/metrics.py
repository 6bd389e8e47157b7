"""Prometheus metrics: raw counters of the engine and times of the server, under vLLM's names with our prefix."""

from collections.abc import Callable, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from engine.protocol import Capabilities, CycleStats, Estimates, Tier

PREFIX = "specter_"
TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
REQUEST_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
REJECTIONS = ("queue_full", "context_length", "loading", "shutting_down", "engine_died")
FINISHES = ("stop", "length", "abort", "error")


class Metrics:
    """All metrics of one served model, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        # When a series was created says nothing here, and would double the output.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._requests()
        self._speculation()
        self._governor()
        self._experts()
        self._placement()

    def _requests(self) -> None:
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", REQUEST_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between the engine's emissions of one or more tokens.", TOKEN_BUCKETS
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "(last token - first token) / (n - 1).", TOKEN_BUCKETS
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", REQUEST_BUCKETS
        )
        self.queue_time = self._histogram("request_queue_time_seconds", "Waiting for the engine.", REQUEST_BUCKETS)
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "From the engine's start to the first token.", REQUEST_BUCKETS
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", REQUEST_BUCKETS
        )
        self.prompt_tokens = self._counter("prompt_tokens_total", "Tokens prefilled.")
        self.generation_tokens = self._counter("generation_tokens_total", "Tokens generated.")
        self.finished = self._counters("request_success_total", "Requests that ended.", "finished_reason", FINISHES)
        self.rejected = self._counters("admission_rejections_total", "Requests refused.", "reason", REJECTIONS)
        self.num_running = self._gauge("num_requests_running", "Requests that use the engine.")
        self.num_waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self.kv_cache_usage = self._gauge("kv_cache_usage_perc", "Share of the context that is used, 0 to 1.")

    def _speculation(self) -> None:
        self.num_drafts = self._counter("spec_decode_num_drafts_total", "Cycles with drafted tokens.")
        self.num_draft_tokens = self._counter("spec_decode_num_draft_tokens_total", "Tokens drafted.")
        self.num_accepted = self._counter("spec_decode_num_accepted_tokens_total", "Drafted tokens accepted.")
        self._accepted_at = Counter(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos_total",
            "Drafted tokens accepted, by position.",
            ("model_name", "position"),
            registry=self.registry,
        )
        self.draft_length = self._gauge("draft_length", "Tokens drafted in the last cycle.")

    def _governor(self) -> None:
        """What the draft length is decided by; with a fixed length these stay 0."""
        texts = {
            "acceptance_rate": ("acceptance_rate", "Probability that a drafted token is accepted."),
            "draft_seconds": ("draft_seconds_per_token", "Time to draft one token."),
            "verify_seconds": ("verify_seconds", "Time of the verify pass, without waiting."),
            "transfer_bytes": ("transfer_bytes", "Bytes that the cycle moves."),
            "bandwidth": ("link_bandwidth_bytes_per_second", "Bandwidth of the link while it is busy."),
            "num_tokens": ("cycle_tokens", "Tokens that the cycle yields."),
            "cycle_seconds": ("cycle_seconds", "Time of the cycle."),
        }
        self._estimates = {
            field: self._gauge(f"governor_{name}", f"{text} Expected of the last cycle.")
            for field, (name, text) in texts.items()
        }

    def _experts(self) -> None:
        self.hits = self._counter("expert_cache_hits_total", "Experts that were resident.")
        self.misses = self._counter("expert_cache_misses_total", "Experts that were not.")
        self.evictions = self._counter("expert_cache_evictions_total", "Experts evicted from a slot.")
        self.prefetches = self._counters("expert_prefetches_total", "Planned transfers.", "outcome", ("used", "wasted"))
        self.demand_fetches = self._counter("expert_demand_fetches_total", "Unplanned transfers.")
        self.transfer_bytes = self._counters(
            "expert_transfer_bytes_total", "Bytes moved to the device.", "kind", ("prefetch", "demand")
        )
        self.transfer_seconds = self._counter("expert_transfer_seconds_total", "Time that the link was busy.")
        self.phases = self._counters(
            "cycle_phase_seconds_total",
            "Time of the step loop.",
            "phase",
            ("draft", "plan", "transfer_wait", "verify"),
        )

    def _placement(self) -> None:
        self.num_slots = self._gauge("expert_cache_slots", "Slots of the expert cache.")
        self._store_bytes = self._tier_gauge("expert_store_bytes", "Full-precision experts that are read from a tier.")
        self._memory_bytes = self._tier_gauge("memory_bytes", "Bytes that the model takes of a tier.")
        self._bandwidth = self._tier_gauge(
            "link_bandwidth_bytes_per_second", "Out of a tier, as measured at the start; absent where it was not."
        )

    def watch_queue(self, num_running: Callable[[], float], num_waiting: Callable[[], float]) -> None:
        self.num_running.set_function(num_running)
        self.num_waiting.set_function(num_waiting)

    def engine_ready(self, capabilities: Capabilities) -> None:
        plan = capabilities.plan
        self.draft_length.set(capabilities.draft_length)
        self.num_slots.set(plan.num_slots)
        self._store_bytes.labels(self._model_name, "host").set(plan.num_host_experts * plan.expert_bytes)
        self._store_bytes.labels(self._model_name, "disk").set(plan.num_disk_experts * plan.expert_bytes)
        for tier in get_args(Tier):
            self._memory_bytes.labels(self._model_name, tier).set(plan.tier_bytes(tier))
        for tier, rate in plan.bandwidths.items():
            self._bandwidth.labels(self._model_name, tier).set(rate)

    def cycle(self, stats: CycleStats) -> None:
        """Add what the engine counted in one cycle, or in one chunk of a prefill."""
        if stats.num_draft_tokens:
            self.num_drafts.inc()
            self.draft_length.set(stats.num_draft_tokens)
        self.num_draft_tokens.inc(stats.num_draft_tokens)
        self.num_accepted.inc(stats.num_accepted_tokens)
        for position in range(stats.num_accepted_tokens):
            self._accepted_at.labels(self._model_name, str(position)).inc()
        self.hits.inc(stats.num_expert_hits)
        self.misses.inc(stats.num_expert_misses)
        self.evictions.inc(stats.num_evictions)
        self.prefetches["used"].inc(stats.num_prefetches_used)
        self.prefetches["wasted"].inc(stats.num_prefetches_wasted)
        self.demand_fetches.inc(stats.num_demand_fetches)
        self.transfer_bytes["prefetch"].inc(stats.prefetch_bytes)
        self.transfer_bytes["demand"].inc(stats.demand_bytes)
        self.transfer_seconds.inc(stats.transfer_seconds)
        self.phases["draft"].inc(stats.draft_seconds)
        self.phases["plan"].inc(stats.plan_seconds)
        self.phases["transfer_wait"].inc(stats.transfer_wait_seconds)
        self.phases["verify"].inc(stats.verify_seconds)

    def estimates(self, estimates: Estimates) -> None:
        """Show what the length of the last draft was decided by."""
        for field, gauge in self._estimates.items():
            gauge.set(getattr(estimates, field))

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ("model_name",), registry=self.registry).labels(self._model_name)

    def _counters(self, name: str, text: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
        """One per value, so that each is shown from the start."""
        counter = Counter(PREFIX + name, text, ("model_name", label), registry=self.registry)
        return {value: counter.labels(self._model_name, value) for value in values}

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, ("model_name",), registry=self.registry).labels(self._model_name)

    def _tier_gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, ("model_name", "tier"), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(PREFIX + name, text, ("model_name",), buckets=buckets, registry=self.registry)
        return histogram.labels(self._model_name)
