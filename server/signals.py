"""SIGINT and SIGTERM: the first asks the server to stop, the second ends it at once."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """`stop` is set by the first signal. `before_exit` is called by the second, which waits for nothing else."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.before_exit: Callable[[], None] = lambda: None

    def receive(self, number: int) -> None:
        if self.stop.is_set():
            self.before_exit()
            os._exit(128 + number)
        print("Stopping when running requests are done; a second signal ends at once.", file=sys.stderr, flush=True)
        self.stop.set()


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Handle the signals in the running event loop."""
    loop = asyncio.get_running_loop()
    signals = StopSignals()
    for number in SIGNALS:
        loop.add_signal_handler(number, signals.receive, number)
    try:
        yield signals
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
