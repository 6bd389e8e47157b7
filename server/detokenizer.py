"""Token ids to text, one at a time, so that the pieces concatenate to what decoding everything at once gives.

A tokenizer decodes a token in its context: bytes of one character may lie in several tokens, and some tokenizers drop
the space before the first word. So a window of recent tokens is decoded as a whole, and what it adds is the new text.
"""

from collections.abc import Callable, Collection, Sequence

REPLACEMENT = "\ufffd"
"""What decoders make of bytes that are no character, or not yet."""
MAX_WINDOW_TOKENS = 32


class Detokenizer:
    """Incremental decoding of one output. Mutable; `decode` must be pure.

    `skipped_ids` are tokens without text, such as special ones; they must not reach the window, where they would look
    like context to a decoder that drops them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], skipped_ids: Collection[int] = ()) -> None:
        self._decode = decode
        self._skipped_ids = skipped_ids
        self._window: list[int] = []
        self._num_sent_chars = 0
        self._boundary = 0
        """Length of the window when it last gave text and ended in whole characters."""

    def push(self, token_id: int) -> str:
        """The text that is now certain; never part of a character."""
        if token_id in self._skipped_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        # All of them: some decoders take back whole characters while the bytes that follow are incomplete.
        whole = text.rstrip(REPLACEMENT)
        delta = whole[self._num_sent_chars :]
        self._num_sent_chars += len(delta)
        if delta and whole == text:
            if len(self._window) > MAX_WINDOW_TOKENS:
                self._shrink()
            self._boundary = len(self._window)
        return delta

    def finish(self) -> str:
        """What was held back: replacement characters for a character that was never completed."""
        delta = self._decode(self._window)[self._num_sent_chars :]
        self._num_sent_chars += len(delta)
        return delta

    def _shrink(self) -> None:
        """Keep the tokens since the last boundary as context: whole characters, at least one."""
        self._window = self._window[self._boundary :]
        self._num_sent_chars = len(self._decode(self._window))
