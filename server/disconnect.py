"""Ends the work for a client that has left; the framework would let a handler run to its end."""

from collections.abc import Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.waiting import unless

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for the log; nobody receives it."""


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The work's response; the work is cancelled where the client leaves first. The body must have been read."""
    return await unless(_left(request), work) or Response(status_code=CLIENT_CLOSED_REQUEST)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
