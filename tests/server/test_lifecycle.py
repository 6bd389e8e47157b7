"""The server from load to exit: progress, drain, death of the engine, and the exit codes."""

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import EngineDiedError, InsufficientMemoryError, UnsupportedModelError
from tests.server import fake_engine
from tests.server.harness import SECONDS, LocalServer, apoll, chat, events, local_server, poll, server_process

pytestmark = pytest.mark.anyio

URL = "/v1/chat/completions"
FOREVER = chat("x", seed=fake_engine.SILENT)


@asynccontextmanager
async def ready_server(
    tmp_path: Path, model_path: Path, **settings: Any
) -> AsyncIterator[tuple[LocalServer, httpx.AsyncClient]]:
    async with local_server(tmp_path, "--model-path", str(model_path), **settings) as server, server.client() as client:

        async def is_ready() -> bool:
            return (await client.get("/ready")).status_code == 200

        await apoll(is_ready)
        yield server, client


async def exit_code(server: LocalServer) -> int:
    return await asyncio.wait_for(server.exit_code, SECONDS)


async def submitted(server: LocalServer) -> None:
    await apoll(lambda: server.log.messages("Submit"))


async def test_progress_while_loading(tmp_path: Path, model_path: Path) -> None:
    gate = tmp_path / "gate"
    options = ("--model-path", str(model_path), "--startup", "wait", "--gate", str(gate))
    async with local_server(tmp_path, *options) as server, server.client() as client:

        async def progress() -> Any:
            response = await client.get("/ready")
            return response if response.json().get("progress") else None

        response = await apoll(progress)
        assert response.status_code == 503
        assert response.json()["status"] == "loading"
        assert response.json()["progress"]["stage"] == "reading weights"
        assert (await client.get("/health")).status_code == 200
        refused = await client.post(URL, json=chat("x"))
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "loading"
        assert "reading weights" in refused.json()["error"]["message"]
        assert (await client.get("/v1/models")).status_code == 503
        gate.touch()

        async def is_ready() -> bool:
            return (await client.get("/ready")).status_code == 200

        await apoll(is_ready)
        assert (await client.post(URL, json=chat("x"))).status_code == 200


async def test_stop_while_loading(tmp_path: Path, model_path: Path) -> None:
    options = ("--model-path", str(model_path), "--startup", "wait", "--gate", str(tmp_path / "gate"))
    async with local_server(tmp_path, *options) as server:
        async with server.client() as client:
            await client.get("/health")
        os.kill(os.getpid(), signal.SIGINT)
        assert await exit_code(server) == 0


@pytest.mark.parametrize(("startup", "error"), [("fail", InsufficientMemoryError), ("die", EngineDiedError)])
async def test_failed_load_is_raised(tmp_path: Path, model_path: Path, startup: str, error: type[Exception]) -> None:
    async with local_server(tmp_path, "--model-path", str(model_path), "--startup", startup) as server:
        with pytest.raises(error):
            await exit_code(server)


@pytest.mark.parametrize("damaged", ["tokenizer.json", "generation_config.json"])
async def test_unusable_text_side_ends_the_start_before_the_engine_has_loaded(
    tmp_path: Path, model_path: Path, damaged: str
) -> None:
    broken = tmp_path / "model"
    shutil.copytree(model_path, broken)
    (broken / damaged).write_text("garbage")
    # The engine would wait for ever.
    options = ("--model-path", str(broken), "--startup", "wait", "--gate", str(tmp_path / "gate"))
    async with local_server(tmp_path, *options) as server:
        with pytest.raises(UnsupportedModelError, match=str(broken)):
            await exit_code(server)
        (started,) = server.log.messages("Started")
        assert not is_running(started["pid"])


async def test_start_is_announced(
    tmp_path: Path, model_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with ready_server(tmp_path, model_path):
        pass
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Ready after"))
    assert line.endswith("s: imports 2.1 s, draft experts 1.2 s")
    assert line in caplog.messages
    assert (
        "5 slots for 16 experts of 1.0 KB, 6 read from host memory and 10 from disk; disk 1.3 GB/s" in caplog.messages
    )


async def test_signal_drains(tmp_path: Path, model_path: Path) -> None:
    async with ready_server(tmp_path, model_path) as (server, client):
        body = chat("x", seed=fake_engine.ENDLESS, max_tokens=1500, stream=True)
        running = asyncio.create_task(client.post(URL, json=body))
        waiting = asyncio.create_task(client.post(URL, json=chat("y")))
        await submitted(server)
        os.kill(os.getpid(), signal.SIGTERM)
        refused = await apoll_refusal(client)
        assert refused["code"] == "shutting_down"
        assert events((await running).text)[-1]["choices"][0]["finish_reason"] == "length"
        assert (await waiting).json()["choices"][0]["finish_reason"] == "stop"
        assert await exit_code(server) == 0
        assert server.log.messages("Shutdown")


async def apoll_refusal(client: httpx.AsyncClient) -> dict[str, Any]:
    async def refused() -> Any:
        response = await client.get("/v1/models")
        return response.json()["error"] if response.status_code == 503 else None

    error: dict[str, Any] = await apoll(refused)
    assert (await client.get("/ready")).status_code == 503
    assert (await client.get("/health")).status_code == 200
    return error


async def test_drain_ends_at_its_limit(tmp_path: Path, model_path: Path) -> None:
    async with ready_server(tmp_path, model_path, shutdown_timeout=0.05) as (server, client):
        requests = [FOREVER | {"stream": True}, FOREVER]
        running, waiting = (asyncio.create_task(client.post(URL, json=body)) for body in requests)
        await submitted(server)
        os.kill(os.getpid(), signal.SIGTERM)
        assert events((await running).text)[-1]["error"]["code"] == "shutting_down"
        assert (await waiting).status_code == 503
        assert await exit_code(server) == 0


async def test_engine_killed(tmp_path: Path, model_path: Path) -> None:
    async with ready_server(tmp_path, model_path) as (server, client):
        stream = asyncio.create_task(client.post(URL, json=chat("x", seed=fake_engine.DIE, stream=True)))
        await submitted(server)
        waiting = asyncio.create_task(client.post(URL, json=chat("y")))
        *chunks, last = events((await stream).text)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert last["error"]["code"] == "engine_died"
        assert "SIGKILL" in last["error"]["message"]
        assert (await waiting).status_code == 503
        health = await client.get("/health")
        assert health.status_code == 503
        assert health.json()["error"]["code"] == "engine_died"
        assert (await client.get("/ready")).status_code == 503
        assert await exit_code(server) == 1


def test_second_signal_ends_at_once(tmp_path: Path, model_path: Path) -> None:
    engine = ("--startup", "deaf", "--model-path", str(model_path))
    with server_process(tmp_path, "serve", "--port", "0", engine=engine) as server:
        (started,) = poll(lambda: server.log.messages("Started"))
        poll(lambda: "reading weights" in server.output.read_text())
        server.process.send_signal(signal.SIGTERM)
        poll(lambda: "Stopping" in server.output.read_text())
        assert server.stop(signal.SIGINT) == 128 + signal.SIGINT
        poll(lambda: not is_running(started["pid"]))
        assert "Traceback" not in server.output.read_text()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # Killed, but not yet reaped by the process that adopted it.
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
