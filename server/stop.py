"""Stop strings in a stream of text: nothing that may become a stop string is sent before it is known not to."""

from collections.abc import Sequence


class StopMatcher:
    """Mutable: holds the text that is not yet certain."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """The text that may be sent now; after a match, that before the stop string, and nothing more."""
        if self.matched:
            return ""
        text = self._held + text
        starts = [start for stop in self._stop if (start := text.find(stop)) >= 0]
        if starts:
            self.matched = True
            self._held = ""
            return text[: min(starts)]
        num_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """What was held back and became no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
