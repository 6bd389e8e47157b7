"""Server-sent events: one JSON chunk per event, an error as an event, and `[DONE]` last."""

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pydantic import BaseModel
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from server.errors import INTERNAL_ERROR, to_api_error
from server.generation import Generation

log = logging.getLogger(__name__)

KEEPALIVE_SECONDS = 5.0
SEPARATOR = "\n"
"""The specification allows CRLF, but clients split on two newlines."""


class EventStream(EventSourceResponse):
    """The chunks of a generation as events. Closes the generation however it ends."""

    def __init__(self, chunks: AsyncGenerator[BaseModel, None], generation: Generation, *, with_usage: bool) -> None:
        self._events = _events(chunks, exclude=None if with_usage else {"usage"})
        self._generation = generation
        super().__init__(self._events, sep=SEPARATOR, ping=KEEPALIVE_SECONDS, ping_message_factory=_keepalive)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            self._generation.close()


async def _events(chunks: AsyncGenerator[BaseModel, None], exclude: set[str] | None) -> AsyncGenerator[str, None]:
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                # ASCII: clients may take U+2028 and its like for the end of a line.
                yield chunk.model_dump_json(exclude=exclude, ensure_ascii=True)
    except Exception as error:
        api_error = to_api_error(error)
        if api_error.code == INTERNAL_ERROR:
            log.exception("a stream ended with an error")
        yield json.dumps(api_error.body())
    yield "[DONE]"


def _keepalive() -> ServerSentEvent:
    return ServerSentEvent(comment="keepalive", sep=SEPARATOR)
