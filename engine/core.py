"""The step loop: one request at a time, one cycle (or one chunk of its prompt) per step."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.errors import ContextLengthError, RequestError, SpecterError
from engine.experts.planner import PrefillPlanner
from engine.experts.transfer import ExpertTransfers
from engine.model.causal_lm import CausalLM
from engine.model.kv_cache import KvCache
from engine.phases import PhaseClock
from engine.protocol import CycleStats, Failed, Finished, FinishReason, Prefill, Submit, Tokens, ToServer
from engine.request import Request
from engine.speculative.draft import NO_DRAFT, Drafter
from engine.speculative.verify import CachedExperts


@dataclass(frozen=True)
class CoreLimits:
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    prefill_chunk_tokens: int
    draft_length: int


class EngineCore:
    """Serves requests in the order in which they came. Not thread-safe: one thread owns it and the device."""

    def __init__(
        self,
        model: CausalLM,
        experts: CachedExperts,
        drafter: Drafter | None,
        transfers: ExpertTransfers,
        prefill_planner: PrefillPlanner,
        clock: PhaseClock,
        limits: CoreLimits,
    ) -> None:
        """Without a `drafter` every cycle decodes one token."""
        self._model = model
        self._experts = experts
        self._drafter = drafter
        self._transfers = transfers
        self._prefill_planner = prefill_planner
        self._clock = clock
        self._limits = limits
        self._queue: deque[Request] = deque()
        self._cache: KvCache | None = None
        self._reported = CycleStats()
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self.send: Callable[[ToServer], None] = lambda message: None
        """Takes every message for the server; set by the owner before the first request."""

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def submit(self, submit: Submit) -> None:
        """Queue a request, or answer it with `Failed` where it cannot be served."""
        try:
            self._queue.append(Request(self._checked(submit), self._limits.eos_token_ids))
        except RequestError as error:
            self._send_failure(submit.request_id, error)

    def abort(self, request_id: str) -> None:
        """End a request, running or queued; unknown ids are ignored."""
        for request in self._queue:
            if request.request_id == request_id:
                self._finish(request, "abort")
                return

    def abort_all(self) -> None:
        for request in list(self._queue):
            self._finish(request, "abort")

    def step(self) -> None:
        """Do the next piece of work for the first request in the queue, which must not be empty."""
        request = self._queue[0]
        try:
            if request.num_prefilled_tokens < len(request.prompt_token_ids):
                self._prefill(request)
            else:
                self._cycle(request)
        except SpecterError as error:
            self._remove(request)
            self._send_failure(request.request_id, error)
            return
        if request.finish_reason is not None:
            self._finish(request, request.finish_reason)

    def _cycle(self, request: Request) -> None:
        assert self._cache is not None
        last_token_id = request.output_token_ids[-1]
        # draft, and plan as the draft's routes become known; the transfers run meanwhile
        draft = NO_DRAFT
        if self._drafter is not None:
            num_tokens = min(self._limits.draft_length, request.num_remaining_tokens - 1)
            draft = self._drafter.propose(last_token_id, num_tokens, request.choose, self._cache)
        # verify, which waits for each expert's transfer by itself
        with self._clock.phase("verify"):
            num_rows = 1 + len(draft.token_ids)
            logits = self._model.forward(
                [last_token_id, *draft.token_ids], self._cache, self._experts, num_logits=num_rows
            )
            verdict = request.judge(draft, logits)
            self._cache.drop(len(draft.token_ids) - verdict.num_accepted)
        token_ids = request.append(verdict.token_ids)
        self.send(Tokens(request.request_id, token_ids, self._take_stats(len(draft.token_ids), verdict.num_accepted)))

    def _prefill(self, request: Request) -> None:
        if self._cache is None:
            self._cache = self._model.new_cache(self._limits.max_model_len)
        start = request.num_prefilled_tokens
        chunk = request.prompt_token_ids[start : start + self._limits.prefill_chunk_tokens]
        with self._clock.phase("verify"):
            self._transfers.plan(self._prefill_planner.predicted(len(chunk)))
            logits = self._model.forward(chunk, self._cache, self._experts)
            self._cache.drop(0)
        request.num_prefilled_tokens += len(chunk)
        num_prompt_tokens = len(request.prompt_token_ids)
        self.send(Prefill(request.request_id, request.num_prefilled_tokens, num_prompt_tokens, self._take_stats()))
        if request.num_prefilled_tokens == num_prompt_tokens:
            token_id, _ = request.choose(logits[-1])
            self.send(Tokens(request.request_id, request.append([token_id]), CycleStats()))

    def _checked(self, submit: Submit) -> Submit:
        """The request with `max_tokens` cut to the room that the prompt leaves. Raises `RequestError`."""
        num_prompt_tokens = len(submit.prompt_token_ids)
        room = self._limits.max_model_len - num_prompt_tokens
        if room <= 0:
            raise ContextLengthError(num_prompt_tokens, self._limits.max_model_len)
        if num_prompt_tokens == 0:
            raise RequestError("The prompt has no tokens; send at least one.")
        for token_id in submit.prompt_token_ids:
            if not 0 <= token_id < self._limits.vocab_size:
                raise RequestError(
                    f"The prompt has token id {token_id}; this model's ids go from 0 to {self._limits.vocab_size - 1}."
                )
        if submit.max_tokens < 1:
            raise RequestError(f"max_tokens is {submit.max_tokens}; ask for at least 1.")
        return msgspec.structs.replace(submit, max_tokens=min(submit.max_tokens, room))

    def _take_stats(self, num_draft_tokens: int = 0, num_accepted_tokens: int = 0) -> CycleStats:
        """What has been counted since the last call."""
        self._num_draft_tokens += num_draft_tokens
        self._num_accepted_tokens += num_accepted_tokens
        experts = self._transfers.stats()
        seconds = self._clock.seconds
        total = msgspec.structs.replace(
            experts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            draft_seconds=seconds["draft"],
            plan_seconds=seconds["plan"],
            verify_seconds=seconds["verify"] - experts.transfer_wait_seconds,
        )
        stats, self._reported = total - self._reported, total
        return stats

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._remove(request)
        self.send(Finished(request.request_id, reason))

    def _remove(self, request: Request) -> None:
        """Take the request out of the queue; if it was running, what it held is freed."""
        if request is self._queue[0]:
            self._transfers.forget_plan()
            self._cache = None
        self._queue.remove(request)

    def _send_failure(self, request_id: str, error: SpecterError) -> None:
        self.send(Failed(request_id, type(error).__name__, str(error)))
