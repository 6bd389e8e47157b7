"""`specter serve` up to the point where two processes import at the same time.

The engine process is started before fastapi, uvicorn and transformers are imported, which nothing that is imported here
may do.
"""

import socket
from collections.abc import Sequence

from engine.client import EngineClient
from server.settings import Settings
from server.signals import stop_signals


async def serve(settings: Settings, listener: socket.socket, engine_command: Sequence[str] | None = None) -> int:
    """Serve until the end and return the exit code; raises SpecterError where the model cannot be loaded."""
    with stop_signals() as signals:
        engine = await EngineClient.start(settings.engine_config(), "serve", engine_command)
        signals.before_exit = engine.kill
        from server.lifecycle import run

        return await run(engine, settings, listener, signals)
