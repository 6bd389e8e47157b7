"""One request, while it is served."""

import msgspec
import torch

from engine.errors import ContextLengthError, RequestError
from engine.protocol import FinishReason, Submit
from engine.sampling import Choice, draw, is_greedy, probability, require_finite, target_distribution
from engine.speculative.acceptance import Verdict, accept_greedy, accept_sampled
from engine.speculative.draft import Draft


class Request:
    """The tokens of one request and how the next ones are chosen. Mutable: tokens are only appended."""

    def __init__(self, submit: Submit, eos_token_ids: frozenset[int]) -> None:
        self.request_id = submit.request_id
        self.prompt_token_ids = submit.prompt_token_ids
        self.output_token_ids: list[int] = []
        self.num_prefilled_tokens = 0
        self._max_tokens = submit.max_tokens
        self._stop_token_ids = frozenset() if submit.ignore_eos else eos_token_ids
        self._sampling = submit.sampling
        self._generator = torch.Generator()
        if submit.sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(submit.sampling.seed)

    @property
    def num_remaining_tokens(self) -> int:
        return self._max_tokens - len(self.output_token_ids)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request is over; None while it is not."""
        if self.output_token_ids and self.output_token_ids[-1] in self._stop_token_ids:
            return "stop"
        return "length" if self.num_remaining_tokens <= 0 else None

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""
        return [*self.prompt_token_ids, *self.output_token_ids]

    def choose(self, logits: torch.Tensor) -> Choice:
        """A token for the logits [V].

        Raises `RequestFailedError` where the logits are not finite.
        """
        require_finite(logits)
        if is_greedy(self._sampling):
            token_id = int(logits.argmax())
            return Choice(token_id, logits, probability(logits, token_id))
        probs = target_distribution(logits, self._sampling)
        token_id = draw(probs, self._generator)
        return Choice(token_id, probs, float(probs[token_id]))

    def judge(self, draft: Draft, logits: torch.Tensor) -> Verdict:
        """Which of the k drafted tokens (from `choose`) the target's logits [k + 1, V] confirm, and what follows.

        Raises `RequestFailedError` where the logits are not finite.
        """
        require_finite(logits)
        if is_greedy(self._sampling):
            return accept_greedy(draft.token_ids, logits)
        target_probs = target_distribution(logits, self._sampling)
        return accept_sampled(draft.token_ids, draft.probs, target_probs, self._generator)

    def append(self, token_ids: list[int]) -> list[int]:
        """Take in decided tokens, up to the first that ends the request; the ones taken."""
        taken = []
        for token_id in token_ids:
            if self.finish_reason is not None:
                break
            self.output_token_ids.append(token_id)
            taken.append(token_id)
        return taken


def fitting(submit: Submit, max_model_len: int, vocab_size: int) -> Submit:
    """The request with `max_tokens` cut to the room that the prompt leaves. Raises `RequestError`."""
    num_prompt_tokens = len(submit.prompt_token_ids)
    room = max_model_len - num_prompt_tokens
    if room <= 0:
        raise ContextLengthError(num_prompt_tokens, max_model_len)
    if num_prompt_tokens == 0:
        raise RequestError("The prompt has no tokens; send at least one.")
    for token_id in submit.prompt_token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"The prompt has token id {token_id}; this model's ids go from 0 to {vocab_size - 1}.")
    if submit.max_tokens < 1:
        raise RequestError(f"max_tokens is {submit.max_tokens}; ask for at least 1.")
    return msgspec.structs.replace(submit, max_tokens=min(submit.max_tokens, room))
