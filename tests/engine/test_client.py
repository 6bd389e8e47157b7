"""The client against a real child process that speaks the protocol (tests/server/fake_engine.py)."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path

import pytest

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.errors import EngineDiedError, InsufficientMemoryError, RequestError, RequestFailedError
from engine.protocol import Finished, Loading, Prefill, SamplingParams, Submit, Tokens
from tests.server import fake_engine

pytestmark = pytest.mark.anyio

Start = Callable[..., AbstractAsyncContextManager[EngineClient]]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


@pytest.fixture
def start(log: Path) -> Start:
    @asynccontextmanager
    async def start(*options: str, task: str = "serve", ready: bool = True) -> AsyncIterator[EngineClient]:
        command = (sys.executable, "-m", "tests.server.fake_engine", "--log", str(log), *options)
        client = await EngineClient.start(EngineConfig(), task, command)  # type: ignore[arg-type]
        try:
            if ready:
                await client.wait_ready(lambda _: None)
            yield client
        finally:
            await client.close(5)
            assert client._process.returncode is not None

    return start


def submit(request_id: str, seed: int | None = fake_engine.ECHO, text: bytes = b"hello world") -> Submit:
    return Submit(request_id, list(text), max_tokens=500, sampling=SamplingParams(seed=seed))


def aborted(log: Path) -> list[str]:
    messages = [json.loads(line) for line in log.read_text().splitlines()]
    return [message["request_id"] for message in messages if message["type"] == "Abort"]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("waited for more than 5 seconds")


def child_processes() -> set[str]:
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


async def token_ids(client: EngineClient, request: Submit) -> list[int]:
    return [i async for event in client.generate(request) if isinstance(event, Tokens) for i in event.token_ids]


async def test_ready_reports_capabilities_and_progress(start: Start) -> None:
    progress: list[Loading] = []
    async with start(ready=False) as client:
        capabilities = await client.wait_ready(progress.append)
    assert capabilities == fake_engine.capabilities()
    assert [message.done for message in progress] == [1000, 2000]
    assert client.died.is_set()


async def test_the_models_directory_is_known_before_it_is_loaded(start: Start, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with start("--startup", "wait", "--gate", str(gate), ready=False) as client:
        assert await client.wait_located(lambda _: None) == "/nowhere"
        gate.touch()
        assert await client.wait_ready(lambda _: None) == fake_engine.capabilities()


@pytest.mark.parametrize(("task", "path"), [("prepare", "/cache/demo"), ("pack", "/cache/packs/demo")])
async def test_prepare_and_pack_return_the_path(start: Start, task: str, path: str) -> None:
    async with start(task=task, ready=False) as client:
        assert await client.wait_prepared(lambda _: None) == path


async def test_plan_returns_the_plan(start: Start) -> None:
    async with start(task="plan", ready=False) as client:
        assert await client.wait_planned(lambda _: None) == fake_engine.model_plan()


async def test_answer_to_another_task_is_an_error(start: Start) -> None:
    async with start(task="prepare", ready=False) as client:
        with pytest.raises(EngineDiedError, match="answered the task 'prepare' with Prepared, not Planned"):
            await client.wait_planned(lambda _: None)


async def test_failed_startup_raises_the_named_error_every_time(start: Start) -> None:
    async with start("--startup", "fail", ready=False) as client:
        for _ in range(2):
            with pytest.raises(InsufficientMemoryError, match="pass --device-memory 3GB"):
                await client.wait_ready(lambda _: None)


@pytest.mark.parametrize(("startup", "reason"), [("die", "signal SIGKILL"), ("garbage", "not a message")])
async def test_death_during_startup_names_the_reason(start: Start, startup: str, reason: str) -> None:
    async with start("--startup", startup, ready=False) as client:
        with pytest.raises(EngineDiedError, match=reason):
            await client.wait_ready(lambda _: None)


async def test_generate_yields_prefill_tokens_finished(start: Start) -> None:
    async with start() as client:
        events = [event async for event in client.generate(submit("a"))]
    assert isinstance(events[0], Prefill)
    assert all(isinstance(event, Tokens) for event in events[1:-1])
    assert events[-1] == Finished("a", "stop")


async def test_two_requests_do_not_mix(start: Start, log: Path) -> None:
    async with start() as client:
        texts = [b"one one one", b"two two two two"]
        replies = await asyncio.gather(*(token_ids(client, submit(f"{i}", text=t)) for i, t in enumerate(texts)))
    assert replies == [[*text, fake_engine.EOS_TOKEN_ID] for text in texts]
    assert aborted(log) == []


async def test_leaving_early_aborts_once(start: Start, log: Path) -> None:
    async with start() as client:
        async with aclosing(client.generate(submit("a", fake_engine.ENDLESS))) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    break
        # The late messages of "a" are dropped, and the engine is free.
        assert (await token_ids(client, submit("b")))[:5] == list(b"hello")
    assert aborted(log) == ["a"]


async def test_cancellation_aborts_once(start: Start, log: Path) -> None:
    async with start() as client:
        task = asyncio.create_task(token_ids(client, submit("a", fake_engine.SILENT)))
        await until(lambda: log.exists() and "Submit" in log.read_text())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.ping(5)
    assert aborted(log) == ["a"]


@pytest.mark.parametrize(("seed", "error"), [(fake_engine.FAIL, RequestError), (fake_engine.FAULT, RequestFailedError)])
async def test_failed_request_raises_and_the_engine_goes_on(
    start: Start, log: Path, seed: int, error: type[RequestError]
) -> None:
    async with start() as client:
        with pytest.raises(RequestError, match="The engine") as caught:
            await token_ids(client, submit("a", seed))
        assert type(caught.value) is error
        assert await token_ids(client, submit("b"))
    assert aborted(log) == []


async def test_request_id_in_use_is_refused(start: Start) -> None:
    async with start() as client, aclosing(client.generate(submit("a", fake_engine.ENDLESS))) as events:
        await anext(events)
        with pytest.raises(ValueError, match="in use"):
            await anext(client.generate(submit("a")))


async def test_death_ends_all_requests_pings_and_later_ones(start: Start) -> None:
    async with start() as client:
        waiting = [token_ids(client, submit("a", fake_engine.DIE)), token_ids(client, submit("b", fake_engine.SILENT))]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDiedError] * 2
        assert "signal SIGKILL" in str(results[0])
        await asyncio.wait_for(client.died.wait(), 5)
        later: list[Awaitable[object]] = [token_ids(client, submit("c")), client.ping(5)]
        for attempt in later:
            with pytest.raises(EngineDiedError, match="SIGKILL"):
                await attempt


async def test_ping_times_out_where_the_engine_hangs(start: Start) -> None:
    async with start() as client:
        await client.ping(5)
        os.kill(client.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await client.ping(0.05)
        os.kill(client.pid, signal.SIGCONT)


async def test_close_kills_a_stubborn_engine_and_is_idempotent(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.client.TERMINATE_SECONDS", 0.05)
    async with start("--startup", "stubborn") as client:
        await asyncio.gather(client.close(0.05), client.close(0.05))
        assert client._process.returncode == -signal.SIGKILL


async def test_cancelled_close_kills(start: Start) -> None:
    async with start("--startup", "stubborn") as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.close(60), 0.05)
        assert client._process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("num_ticks", [1, 2, 3, 5, 10])
async def test_cancelled_start_leaves_no_process(num_ticks: int) -> None:
    command = (sys.executable, "-m", "tests.server.fake_engine", "--startup", "stubborn")
    before = child_processes()
    starting = asyncio.create_task(EngineClient.start(EngineConfig(), "serve", command))
    for _ in range(num_ticks):
        await asyncio.sleep(0)
    starting.cancel()
    try:
        client = await starting
    except asyncio.CancelledError:
        pass
    else:
        await client.close(0)
    assert child_processes() == before


async def test_engine_is_out_of_the_terminals_reach(start: Start) -> None:
    async with start() as client:
        assert os.getpgid(client.pid) != os.getpgid(0)
