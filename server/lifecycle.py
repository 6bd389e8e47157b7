"""The life of the server process: listen, load, serve until a signal or the engine's death, drain, close.

The HTTP listener is up from the start, so that /health and /ready tell of the load. The exit code is 0 after a signal
and 1 after the engine's death; what goes wrong during start-up is raised.
"""

import asyncio
import importlib
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from rich.console import Console

from engine.client import EngineClient
from engine.errors import EngineDiedError
from engine.protocol import Capabilities, Loading
from server.app import create_app
from server.console import LoadProgress, print_capabilities, print_ready
from server.generation import Generator
from server.listener import base_url
from server.sampling import default_sampling
from server.settings import Settings
from server.signals import StopSignals, stop_signals
from server.state import ServerState
from server.waiting import unless, within

ENGINE_GRACE_SECONDS = 5.0
"""For the engine to end its step after it was told to shut down."""
LAST_RESPONSES_SECONDS = 5
"""For responses that end with an error to reach their clients."""
DEATH_NOTICE_SECONDS = 2.0
"""The listener stays this long after the engine's death, so that probes see /health turn 503."""


async def serve(settings: Settings, listener: socket.socket, engine_command: Sequence[str] | None = None) -> int:
    """Serve until the end and return the exit code; raises SpecterError where the model cannot be loaded."""
    state = ServerState(settings.model_name, settings.queue_length, settings.default_max_tokens)
    with stop_signals() as signals:
        async with _http_server(create_app(state), listener):
            engine = await EngineClient.start(settings.engine_config(), command=engine_command)
            signals.before_exit = engine.kill
            try:
                return await _run(engine, state, settings, signals, base_url(settings.host, listener))
            finally:
                await engine.close(ENGINE_GRACE_SECONDS)
                await within(LAST_RESPONSES_SECONDS, state.idle())


async def _run(engine: EngineClient, state: ServerState, settings: Settings, signals: StopSignals, url: str) -> int:
    capabilities = await unless(signals.stop.wait(), _load(engine, state))
    if capabilities is None:
        return 0
    console = Console()
    print_capabilities(capabilities, console)
    print_ready(url, state.model_name, console)
    await unless(signals.stop.wait(), engine.died.wait())
    if engine.error is None:
        state.drain()
        await unless(engine.died.wait(), within(settings.shutdown_timeout, state.idle()))
    if engine.error is not None:
        await _report_death(engine.error, state, signals)
        return 1
    return 0


async def _load(engine: EngineClient, state: ServerState) -> Capabilities:
    """Wait for the engine, while transformers is imported, then open the door to requests."""
    importing = asyncio.create_task(asyncio.to_thread(importlib.import_module, "server.tokenizer"))
    try:
        with LoadProgress() as show:

            def on_progress(message: Loading) -> None:
                state.progress = message
                show(message)

            capabilities = await engine.wait_ready(on_progress)
        await importing
    finally:
        importing.cancel()
    state.ready(await asyncio.to_thread(_build_generator, engine, capabilities, state))
    return capabilities


def _build_generator(engine: EngineClient, capabilities: Capabilities, state: ServerState) -> Generator:
    from server.tokenizer import Tokenizer

    model_path = Path(capabilities.model_path)
    state.metrics.engine_ready(capabilities)
    return Generator(
        engine, capabilities, Tokenizer(model_path), default_sampling(model_path), state.admission, state.metrics
    )


async def _report_death(error: EngineDiedError, state: ServerState, signals: StopSignals) -> None:
    state.engine_died(error)
    print(f"specter: error: {error}", file=sys.stderr, flush=True)
    await within(LAST_RESPONSES_SECONDS, state.idle())
    await within(DEATH_NOTICE_SECONDS, signals.stop.wait())


class _HttpServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `stop_signals`: uvicorn would close the listener first, and exit by the signal."""
        yield


@asynccontextmanager
async def _http_server(app: FastAPI, listener: socket.socket) -> AsyncIterator[None]:
    config = uvicorn.Config(
        app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=LAST_RESPONSES_SECONDS
    )
    server = _HttpServer(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await running
