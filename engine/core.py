"""The step loop: one request at a time, one cycle (or one chunk of its prompt) per step."""

import time
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from engine.experts.planner import PrefillPlanner
from engine.experts.transfer import ExpertTransfers
from engine.model.causal_lm import CausalLM
from engine.model.kv_cache import KvCache
from engine.phases import PhaseClock
from engine.protocol import (
    CycleStats,
    Estimates,
    Prefill,
    Tokens,
    Traced,
)
from engine.request import Request
from engine.serial_core import SerialCore
from engine.speculative.cycle import Cycle
from engine.speculative.draft import NO_DRAFT, Drafter
from engine.speculative.governor import DraftControl
from engine.speculative.verify import CachedExperts
from engine.trace import Tracer


@dataclass(frozen=True)
class CoreLimits:
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    prefill_chunk_tokens: int


class TargetExperts(NamedTuple):
    """The full-precision experts, for passes whose transfers are planned beforehand, and for others."""

    planned: CachedExperts
    unplanned: CachedExperts


class EngineCore(SerialCore):
    """Drafts, plans, moves experts and verifies. One thread owns it and the device."""

    def __init__(
        self,
        model: CausalLM,
        experts: TargetExperts,
        drafter: Drafter | None,
        control: DraftControl,
        transfers: ExpertTransfers,
        prefill_planner: PrefillPlanner | None,
        clock: PhaseClock,
        tracer: Tracer,
        limits: CoreLimits,
    ) -> None:
        """Without a `drafter` every cycle decodes one token.

        Without a `prefill_planner` the experts of a prompt are fetched as they are asked for.
        """
        super().__init__(limits.max_model_len, limits.vocab_size, limits.eos_token_ids)
        self._model = model
        self._experts = experts
        self._drafter = drafter
        self._control = control
        self._transfers = transfers
        self._prefill_planner = prefill_planner
        self._clock = clock
        self._tracer = tracer
        self._limits = limits
        self._cache: KvCache | None = None
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._reported = self._counted()

    def advance(self, request: Request) -> None:
        if request.num_prefilled_tokens < len(request.prompt_token_ids):
            self._prefill(request)
        else:
            self._cycle(request)

    def release(self, request: Request) -> None:
        self._transfers.forget_plan()
        self._cache = None
        if self._tracer.is_on:
            self.send(Traced(request.request_id, self._tracer.take()))

    def _cycle(self, request: Request) -> None:
        assert self._cache is not None
        started = time.perf_counter()
        # draft, and plan as the draft's routes become known; the transfers run meanwhile
        draft = NO_DRAFT
        if self._drafter is not None:
            max_tokens = min(self._control.max_length, request.num_remaining_tokens - 1)
            draft = self._drafter.propose(request.token_ids, max_tokens, request.choose, self._cache, self._control)
        # verify, which waits for each expert's transfer by itself
        with self._clock.phase("verify"), self._tracer.span("phase", "verify", tokens=1 + len(draft.token_ids)):
            rows = [request.output_token_ids[-1], *draft.token_ids]
            experts = self._experts.planned if draft.is_planned else self._experts.unplanned
            logits = self._model.forward(rows, self._cache, experts, num_logits=len(rows))
            verdict = request.judge(draft, logits)
            self._cache.drop(len(draft.token_ids) - verdict.num_accepted)
        token_ids = request.append(verdict.token_ids)
        stats = self._take_stats(len(draft.token_ids), verdict.num_accepted)
        cycle = Cycle(
            confidences=draft.confidences,
            num_accepted=verdict.num_accepted,
            draft_seconds=stats.draft_seconds + stats.plan_seconds,
            verify_seconds=stats.verify_seconds,
            seconds=time.perf_counter() - started,
            transfer_bytes=stats.moved_bytes,
            transfer_seconds=stats.transfer_seconds,
        )
        estimates = self._control.estimates
        self._control.cycle_ended(cycle)
        self._trace_cycle(started, cycle, estimates)
        self.send(Tokens(request.request_id, token_ids, stats, estimates))

    def _trace_cycle(self, started: float, cycle: Cycle, estimates: Estimates | None) -> None:
        expected = {f"expected_{name}": value for name, value in msgspec.to_builtins(estimates or {}).items()}
        self._tracer.add(
            "cycle",
            "cycle",
            started,
            started + cycle.seconds,
            drafted=len(cycle.confidences),
            accepted=cycle.num_accepted,
            transfer_bytes=cycle.transfer_bytes,
            **expected,
        )

    def _prefill(self, request: Request) -> None:
        if self._cache is None:
            self._cache = self._model.new_cache(self._limits.max_model_len)
        start = request.num_prefilled_tokens
        chunk = request.prompt_token_ids[start : start + self._limits.prefill_chunk_tokens]
        with self._clock.phase("verify"), self._tracer.span("phase", "prefill", tokens=len(chunk)):
            predicted = self._prefill_planner.predicted(len(chunk)) if self._prefill_planner else []
            self._transfers.plan(predicted)
            experts = self._experts.planned if predicted else self._experts.unplanned
            logits = self._model.forward(chunk, self._cache, experts)
            self._cache.drop(0)
        request.num_prefilled_tokens += len(chunk)
        num_prompt_tokens = len(request.prompt_token_ids)
        self.send(Prefill(request.request_id, request.num_prefilled_tokens, num_prompt_tokens, self._take_stats()))
        if request.num_prefilled_tokens == num_prompt_tokens:
            token_id = request.choose(logits[-1]).token_id
            self.send(Tokens(request.request_id, request.append([token_id]), CycleStats()))

    def _take_stats(self, num_draft_tokens: int = 0, num_accepted_tokens: int = 0) -> CycleStats:
        """What has been counted since the last call."""
        self._num_draft_tokens += num_draft_tokens
        self._num_accepted_tokens += num_accepted_tokens
        total = self._counted()
        stats, self._reported = total - self._reported, total
        return stats

    def _counted(self) -> CycleStats:
        """All that has been counted, also before there was a core."""
        experts = self._transfers.stats()
        seconds = self._clock.seconds
        return msgspec.structs.replace(
            experts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            draft_seconds=seconds["draft"],
            plan_seconds=seconds["plan"],
            verify_seconds=seconds["verify"] - experts.transfer_wait_seconds,
        )
