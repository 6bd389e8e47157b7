"""The door to the model: counts the requests in flight, and refuses new ones while it is loading, draining or dead."""

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import error_response
from server.state import ServerState

MAX_BODY_BYTES = 16 * 1024 * 1024
"""More than a prompt of a million tokens needs. Tokenizing takes about 70 times as much memory for a moment."""


class Gate:
    """Pure ASGI: starlette's own middleware base hides from handlers that a client has left."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        if refusal := self._state.refusal():
            self._state.metrics.rejected[str(refusal.code)].inc()
            await error_response(refusal)(scope, receive, send)
            return
        with self._state.in_flight():
            await self._app(scope, _limited(receive), send)


def _limited(receive: Receive) -> Receive:
    num_bytes = 0

    async def receive_limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, f"The body is longer than {MAX_BODY_BYTES} bytes; send a shorter prompt.")
        return message

    return receive_limited
