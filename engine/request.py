"""One request, while it is served."""

import torch

from engine.protocol import FinishReason, Submit
from engine.sampling import draw, is_greedy, require_finite, target_distribution
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

    def choose(self, logits: torch.Tensor) -> tuple[int, torch.Tensor]:
        """A token for the logits [V], with the distribution [V] that it was drawn from (the logits, if greedy).

        Raises `RequestFailedError` where the logits are not finite.
        """
        require_finite(logits)
        if is_greedy(self._sampling):
            return int(logits.argmax()), logits
        probs = target_distribution(logits, self._sampling)
        return draw(probs, self._generator), probs

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
