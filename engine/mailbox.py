"""Where the messages of the engine process wait for those who asked, on the server's side.

Everything is told to each waiter once, in order. After `fail`, nobody waits for ever: those who wait now, and those who
come later, get the error.
"""

import asyncio

from engine import errors
from engine.errors import EngineDiedError, RequestError, RequestFailedError, SpecterError
from engine.protocol import (
    Failed,
    Finished,
    Loading,
    Located,
    Planned,
    Pong,
    Prefill,
    Prepared,
    Ready,
    Tokens,
    ToServer,
    Traced,
)

StartupEvent = Loading | Located | Ready | Prepared | Planned
GenerationEvent = Prefill | Tokens | Traced | Finished


class Mailbox:
    """Mutable; belongs to one event loop."""

    def __init__(self) -> None:
        self.startup: asyncio.Queue[StartupEvent | SpecterError] = asyncio.Queue()
        self.requests: dict[str, asyncio.Queue[GenerationEvent | SpecterError]] = {}
        self.pings: dict[int, asyncio.Future[None]] = {}
        self.error: EngineDiedError | None = None
        self.died = asyncio.Event()

    def deliver(self, message: ToServer) -> None:
        match message:
            case Loading() | Located() | Ready() | Prepared() | Planned():
                self.startup.put_nowait(message)
            case Prefill() | Tokens() | Traced() | Finished():
                self._answer(message.request_id, message)
            case Failed(request_id=str() as request_id):
                self._answer(request_id, _request_error(message))
            case Failed():
                self.fail(_engine_error(message))
            case Pong() if (answer := self.pings.get(message.nonce)) and not answer.done():
                answer.set_result(None)

    def _answer(self, request_id: str, event: GenerationEvent | SpecterError) -> None:
        # Nobody waits any more for what the engine sent before it saw an abort.
        if events := self.requests.get(request_id):
            events.put_nowait(event)

    def fail(self, error: SpecterError) -> None:
        """The engine is gone, or cannot go on; the first reason stays."""
        if self.error is not None:
            return
        self.error = error if isinstance(error, EngineDiedError) else EngineDiedError(str(error))
        self.startup.put_nowait(error)
        for events in self.requests.values():
            events.put_nowait(self.error)
        for answer in self.pings.values():
            if not answer.done():
                answer.set_exception(self.error)
        self.died.set()


def _request_error(failed: Failed) -> RequestError:
    cls = getattr(errors, failed.kind, None)
    if not (isinstance(cls, type) and issubclass(cls, RequestError)):
        cls = RequestFailedError
    # `__new__` sets the message; a subclass's `__init__` may take something else.
    return cls.__new__(cls, failed.message)


def _engine_error(failed: Failed) -> SpecterError:
    cls = getattr(errors, failed.kind, None)
    if not (isinstance(cls, type) and issubclass(cls, SpecterError)):
        return EngineDiedError(f"The engine failed: {failed.message}")
    return cls.__new__(cls, failed.message)
