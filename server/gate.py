"""The door to the model: counts the requests in flight, and refuses new ones while it is loading, draining or dead."""

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import error_response
from server.state import ServerState


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
            await self._app(scope, receive, send)
