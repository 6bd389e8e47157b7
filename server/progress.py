"""The progress of long work on a model, with the time that it will still take."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engine.protocol import Loading
from server.formats import duration, size

LINE_SECONDS = 5.0
"""How often a stage is reported where there is no terminal to draw on."""
WHOLE_STAGE_SECONDS = 1e9
"""The bars' time left is told by the rate of the whole stage: a layer may take longer than any shorter window."""


class LoadProgress:
    """Shows `Loading` messages on stderr: a bar per stage in a terminal, else a line now and then. Mutable."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._first: Loading | None = None
        self._first_seconds = 0.0
        self._task: TaskID | None = None
        self._last_line_seconds = 0.0
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            speed_estimate_period=WHOLE_STAGE_SECONDS,
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def __call__(self, message: Loading) -> None:
        if self._console.is_terminal:
            self._draw(message)
        else:
            self._write(message)

    def _draw(self, message: Loading) -> None:
        amount = _amount(message)
        total = message.total or None
        if self._task is None or self._is_new_stage(message):
            if self._task is not None:
                self._bars.stop_task(self._task)
            self._first = message
            self._task = self._bars.add_task(escape(message.stage), total=total, amount=amount)
        self._bars.update(self._task, completed=message.done, total=total, amount=amount)

    def _write(self, message: Loading) -> None:
        now = time.monotonic()
        is_new = self._is_new_stage(message)
        if is_new:
            self._first, self._first_seconds = message, now
        is_complete = 0 < message.total == message.done
        if is_new or is_complete or now - self._last_line_seconds >= LINE_SECONDS:
            self._last_line_seconds = now
            details = ", ".join(part for part in (_amount(message), self._time_left(message, now)) if part)
            line = f"{message.stage}: {details}" if details else message.stage
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _is_new_stage(self, message: Loading) -> bool:
        return self._first is None or message.stage != self._first.stage

    def _time_left(self, message: Loading, now: float) -> str:
        """By the stage's own rate; nothing where there is none yet, or no end."""
        assert self._first is not None
        # Where earlier work is resumed, the first message already has some done.
        num_done = message.done - self._first.done
        num_left = message.total - message.done
        if num_done <= 0 or num_left <= 0:
            return ""
        return f"about {duration(num_left * (now - self._first_seconds) / num_done)} left"


def _amount(message: Loading) -> str:
    done, total = (size(n) if message.unit == "bytes" else str(n) for n in (message.done, message.total))
    if message.total:
        return f"{done} of {total}"
    return done if message.done else ""
