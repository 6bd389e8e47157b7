"""What proposes tokens for verification."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from engine.experts.planner import LookaheadBuffer
from engine.experts.transfer import ExpertTransfers
from engine.model.causal_lm import CausalLM
from engine.model.kv_cache import KvCache
from engine.phases import PhaseClock
from engine.sampling import Choice
from engine.speculative.governor import DraftControl, DraftState
from engine.speculative.ngram import MAX_NGRAM, lookup
from engine.speculative.quantized import QuantizedExperts
from engine.trace import Tracer


class Draft(NamedTuple):
    token_ids: list[int]
    probs: list[torch.Tensor]
    """What each token was drawn from, [V] each, as `choose` returned it."""
    confidences: list[float]
    """The probability of each token by the drafter's own account."""
    is_planned: bool
    """Whether the transfers that verification needs are planned."""


NO_DRAFT = Draft([], [], [], is_planned=False)


class Drafter(Protocol):
    def propose(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        choose: Callable[[torch.Tensor], Choice],
        cache: KvCache,
        control: DraftControl,
    ) -> Draft:
        """Up to `max_tokens` tokens after `token_ids`, the text so far, as many as `control` wants.

        The cache holds all of the text but its last token, and is left as it was.
        """


class QuantizedDrafter:
    """Runs the model with quantized experts, and plans the transfers that verifying will need while it does."""

    def __init__(
        self,
        model: CausalLM,
        experts: QuantizedExperts,
        transfers: ExpertTransfers,
        clock: PhaseClock,
        tracer: Tracer,
    ) -> None:
        self._model = model
        self._experts = experts
        self._transfers = transfers
        self._clock = clock
        self._tracer = tracer

    def propose(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        choose: Callable[[torch.Tensor], Choice],
        cache: KvCache,
        control: DraftControl,
    ) -> Draft:
        """The plan grows with every pass, so transfers overlap the draft.

        One pass more than there are tokens tells the routes of the last one.
        """
        draft = Draft([], [], [], is_planned=True)
        lookahead = LookaheadBuffer()
        moved_before = self._transfers.moved_bytes
        planned_bytes: int | None = None
        token_id = token_ids[-1]
        num_passes = 0
        with self._clock.phase("draft"):
            is_wanted = True
            while is_wanted:
                state = DraftState(draft.confidences, num_passes, planned_bytes)
                is_wanted = len(draft.token_ids) < max_tokens and control.wants_token(state)
                if not is_wanted and not draft.token_ids:
                    return NO_DRAFT
                with self._tracer.span("phase", "draft", position=len(draft.token_ids)):
                    logits = self._model.forward([token_id], cache, self._experts)
                    num_passes += 1
                    pending = self._experts.take_routes()
                    if is_wanted:
                        token_id, probs, confidence = choose(logits[-1])
                        draft.token_ids.append(token_id)
                        draft.probs.append(probs)
                        draft.confidences.append(confidence)
                    # Only now: choosing has waited for the pass anyway, and the routes have arrived meanwhile.
                    routes = pending.read()
                with self._clock.phase("plan"):
                    lookahead.add(routes)
                    left_bytes = self._transfers.plan(lookahead.predicted())
                    planned_bytes = self._transfers.moved_bytes - moved_before + left_bytes
            cache.drop(num_passes)
        return draft


class NgramDrafter:
    """Proposes what followed the text's last tokens before."""

    def __init__(self, vocab_size: int, clock: PhaseClock) -> None:
        self._vocab_size = vocab_size
        self._clock = clock

    def propose(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        choose: Callable[[torch.Tensor], Choice],
        cache: KvCache,
        control: DraftControl,
    ) -> Draft:
        draft = Draft([], [], [], is_planned=False)
        with self._clock.phase("draft"):
            found, size = lookup(token_ids, max_tokens)
            confidence = size / (MAX_NGRAM + 1)
            for token_id in found:
                if not control.wants_token(DraftState(draft.confidences)):
                    break
                draft.token_ids.append(token_id)
                draft.confidences.append(confidence)
                draft.probs.append(self._certain(token_id))
        return draft

    def _certain(self, token_id: int) -> torch.Tensor:
        """The distribution [V] of a token that is proposed without a draw."""
        probs = torch.zeros(self._vocab_size)
        probs[token_id] = 1.0
        return probs
