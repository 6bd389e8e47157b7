"""What a person sees in the terminal: the progress of start-up, the memory table, and where the server listens."""

import sys
import time
from types import TracebackType
from typing import Self

from pydantic import ByteSize
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from engine.protocol import Capabilities, Loading

LINE_SECONDS = 5.0
"""How often a stage is reported where there is no terminal to draw on."""


def size(num_bytes: int) -> str:
    return ByteSize(num_bytes).human_readable(decimal=True, separator=" ")


class LoadProgress:
    """Shows `Loading` messages on stderr: a bar per stage in a terminal, else a line now and then. Mutable."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._stage = ""
        self._task: TaskID | None = None
        self._last_line_seconds = 0.0
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=self._console,
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
        self._stage = message.stage

    def _draw(self, message: Loading) -> None:
        amount = _amount(message)
        total = message.total or None
        if self._task is None or message.stage != self._stage:
            if self._task is not None:
                self._bars.stop_task(self._task)
            self._task = self._bars.add_task(escape(message.stage), total=total, amount=amount)
        self._bars.update(self._task, completed=message.done, total=total, amount=amount)

    def _write(self, message: Loading) -> None:
        now = time.monotonic()
        complete = 0 < message.total == message.done
        if message.stage != self._stage or complete or now - self._last_line_seconds >= LINE_SECONDS:
            self._last_line_seconds = now
            amount = _amount(message)
            line = f"{message.stage}: {amount}" if amount else message.stage
            self._console.print(line, markup=False, highlight=False)


def _amount(message: Loading) -> str:
    done, total = (size(n) if message.unit == "bytes" else str(n) for n in (message.done, message.total))
    if message.total:
        return f"{done} of {total}"
    return done if message.done else ""


def print_capabilities(capabilities: Capabilities, console: Console) -> None:
    """The memory table and the decisions of start-up."""
    table = Table("part", "tier", "size", "note")
    table.columns[2].justify = "right"
    for row in capabilities.memory:
        table.add_row(escape(row.part), row.tier, size(row.num_bytes), escape(row.note))
    table.add_section()
    for tier in dict.fromkeys(row.tier for row in capabilities.memory):
        num_bytes = sum(row.num_bytes for row in capabilities.memory if row.tier == tier)
        note = f"of a budget of {size(capabilities.device_memory_bytes)}" if tier == "device" else ""
        table.add_row("total", tier, size(num_bytes), note)
    console.print(table)
    for decision in capabilities.decisions:
        console.print(Text(f"- {decision}"))


def print_ready(base_url: str, model_name: str, console: Console) -> None:
    body = f'{{"model": "{model_name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    # Not wrapped, so that it can be pasted.
    console.print(Text(f"\nReady on {base_url} with the model '{model_name}'. Try:"), soft_wrap=True)
    command = f"curl {base_url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
    console.print(Text(command), soft_wrap=True)
