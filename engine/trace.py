"""What the engine did when: a timeline of one request, for the bench."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.protocol import TraceEvent, Track


class Tracer:
    """Collects events while it is on. `add` and `span` may be called from any thread."""

    def __init__(self, is_on: bool = False) -> None:
        self.is_on = is_on
        self._events: deque[TraceEvent] = deque()

    def add(self, track: Track, name: str, start_seconds: float, end_seconds: float, **arguments: Any) -> None:
        """Something that was done between two readings of `time.perf_counter`."""
        if self.is_on:
            self._events.append(TraceEvent(name, track, start_seconds, end_seconds - start_seconds, arguments))

    @contextmanager
    def span(self, track: Track, name: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """What is done within the block, which may add to the arguments."""
        start_seconds = time.perf_counter()
        try:
            yield arguments
        finally:
            self.add(track, name, start_seconds, time.perf_counter(), **arguments)

    def take(self) -> list[TraceEvent]:
        """The events since the last call."""
        # Others go on to add some: a list that is swapped for a new one may still get events that nobody takes.
        return [self._events.popleft() for _ in range(len(self._events))]


NO_TRACE = Tracer()
