"""The text of one request, from token ids: end-of-sequence, detokenizer and stop strings in their order.

It works token by token, so that where a text ends does not depend on how many tokens the engine decides at once.
"""

from collections.abc import Collection, Sequence
from typing import Literal

from server.detokenizer import Detokenizer
from server.stop import StopMatcher

FinishReason = Literal["stop", "length"]


class OutputText:
    """Mutable. `eos_token_ids` end the text and are not part of it; empty where they are to be ignored."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str], eos_token_ids: Collection[int]) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop)
        self._eos_token_ids = eos_token_ids
        self.num_tokens = 0
        """Tokens up to the one that ended the text, which counts."""

    @property
    def stopped(self) -> bool:
        """A stop string was found: no more text will come."""
        return self._matcher.matched

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token_id in token_ids:
            self.num_tokens += 1
            if token_id not in self._eos_token_ids:
                text += self._matcher.push(self._detokenizer.push(token_id))
            if self.stopped:
                break
        return text

    def finish(self) -> str:
        """The text that was held back, once there are no more tokens."""
        text = self._matcher.push(self._detokenizer.finish())
        return text + self._matcher.finish()
