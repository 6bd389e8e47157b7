"""The life of the server process, once the engine process is started: load, serve until a signal or the engine's death,
drain, close.

The HTTP listener is up from the start, so that /health and /ready tell of the load. The exit code is 0 after a signal
and 1 after the engine's death; what goes wrong during start-up is raised.
"""

import asyncio
import importlib
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from rich.console import Console

from engine.client import EngineClient
from engine.errors import EngineDiedError
from engine.protocol import Capabilities, Loading, SamplingParams
from server import STARTED_SECONDS
from server.app import create_app
from server.console import print_ready, startup_line
from server.generation import Generator
from server.listener import base_url
from server.plan import plan_line, print_plan
from server.progress import LoadProgress
from server.sampling import default_sampling
from server.settings import Settings
from server.signals import StopSignals
from server.state import ServerState
from server.waiting import both, unless, within

if TYPE_CHECKING:
    # Importing it takes seconds, in which the listener should be up.
    from server.tokenizer import Tokenizer

log = logging.getLogger(__name__)

ENGINE_GRACE_SECONDS = 5.0
"""For the engine to end its step after it was told to shut down."""
LAST_RESPONSES_SECONDS = 5
"""For responses that end with an error to reach their clients."""
DEATH_NOTICE_SECONDS = 2.0
"""The listener stays this long after the engine's death, so that probes see /health turn 503."""


async def run(engine: EngineClient, settings: Settings, listener: socket.socket, signals: StopSignals) -> int:
    """Serve until the end, close the engine, and return the exit code; raises SpecterError where loading fails."""
    state = ServerState(settings.model_name, settings.queue_length, settings.default_max_tokens)
    async with _http_server(create_app(state), listener):
        try:
            return await _run(engine, state, settings, signals, base_url(settings.host, listener))
        finally:
            await engine.close(ENGINE_GRACE_SECONDS)
            await within(LAST_RESPONSES_SECONDS, state.idle())


async def _run(engine: EngineClient, state: ServerState, settings: Settings, signals: StopSignals, url: str) -> int:
    capabilities = await unless(signals.stop.wait(), _load(engine, state))
    if capabilities is None:
        return 0
    _announce(capabilities, url, state.model_name)
    await unless(signals.stop.wait(), engine.died.wait())
    if engine.error is None:
        state.drain()
        await unless(engine.died.wait(), within(settings.shutdown_timeout, state.idle()))
    if engine.error is not None:
        await _report_death(engine.error, state, signals)
        return 1
    return 0


async def _load(engine: EngineClient, state: ServerState) -> Capabilities:
    """Load the text side while the engine loads the model, then open the door to requests.

    Whichever fails ends the other: a model without a usable tokenizer is not packed first.
    """
    importing = asyncio.create_task(asyncio.to_thread(importlib.import_module, "server.tokenizer"))
    try:
        with LoadProgress() as show:

            def on_progress(message: Loading) -> None:
                state.progress = message
                show(message)

            model_path = Path(await engine.wait_located(on_progress))
            loading_text = asyncio.to_thread(_load_text, model_path)
            (tokenizer, sampling), capabilities = await both(loading_text, engine.wait_ready(on_progress))
    finally:
        importing.cancel()
    state.metrics.engine_ready(capabilities)
    state.ready(Generator(engine, capabilities, tokenizer, sampling, state.admission, state.metrics))
    return capabilities


def _load_text(model_path: Path) -> "tuple[Tokenizer, SamplingParams]":
    from server.tokenizer import Tokenizer

    return Tokenizer(model_path), default_sampling(model_path)


def _announce(capabilities: Capabilities, url: str, model_name: str) -> None:
    console = Console()
    print_plan(capabilities.plan, console)
    started = startup_line(time.monotonic() - STARTED_SECONDS, capabilities.startup_seconds)
    console.print(started, markup=False, highlight=False, soft_wrap=True)
    log.info(started)
    log.info(plan_line(capabilities.plan))
    print_ready(url, model_name, console)


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
