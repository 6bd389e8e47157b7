"""Servers to test against: a real `specter serve` process, or `serve` in the test's own event loop."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from server.listener import base_url, listen
from server.serve import serve
from server.settings import Settings

SECONDS = 20.0
"""Far more than anything here takes."""


@dataclass
class EngineLog:
    """What the fake engine received."""

    path: Path

    def messages(self, kind: str) -> list[dict[str, Any]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [message for message in map(json.loads, lines) if message["type"] == kind]


@dataclass
class ServerProcess:
    process: subprocess.Popen[bytes]
    output: Path
    log: EngineLog

    @property
    def url(self) -> str:
        match = poll(lambda: re.search(r"Ready on (\S+)", self.output.read_text()) or self.process.poll() is not None)
        assert isinstance(match, re.Match), self.output.read_text()
        return str(match[1])

    def wait(self) -> int:
        return self.process.wait(SECONDS)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()


@contextmanager
def server_process(folder: Path, *arguments: str, engine: tuple[str, ...] = ()) -> Iterator[ServerProcess]:
    log, output = folder / "engine.log", folder / "output"
    command = [sys.executable, "-m", "tests.server.run_server", "--log", str(log), *engine, "--", *arguments]
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield ServerProcess(process, output, EngineLog(log))
    finally:
        process.kill()
        process.wait()


@dataclass
class LocalServer:
    url: str
    exit_code: "asyncio.Task[int]"
    log: EngineLog

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=SECONDS)


@asynccontextmanager
async def local_server(folder: Path, *engine: str, **settings: Any) -> AsyncIterator[LocalServer]:
    """`serve` as a task; it gets the signals that the test sends to its own process."""
    log = EngineLog(folder / "engine.log")
    command = [sys.executable, "-m", "tests.server.fake_engine", "--log", str(log.path), *engine]
    with listen("127.0.0.1", 0) as listener:
        task = asyncio.create_task(serve(Settings(**{"model": "demo", **settings}), listener, command))
        try:
            yield LocalServer(base_url("127.0.0.1", listener), task, log)
        finally:
            task.cancel()
            await asyncio.wait({task})


def poll(condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)
    return value


async def apoll(condition: Callable[[], Awaitable[Any]] | Callable[[], Any]) -> Any:
    async with asyncio.timeout(SECONDS):
        while True:
            value = condition()
            if isinstance(value, Awaitable):
                value = await value
            if value:
                return value
            await asyncio.sleep(0.005)


def chat(text: str, **parameters: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], **parameters}


def events(body: str) -> list[dict[str, Any]]:
    """The JSON of a stream's events, which `[DONE]` must end."""
    data = [line.removeprefix("data: ") for line in body.split("\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]
