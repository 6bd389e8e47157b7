"""A client that leaves frees the engine, wherever its request was; and clients never see each other's text."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.server import fake_engine
from tests.server.harness import LocalServer, apoll, chat, events, local_server

pytestmark = pytest.mark.anyio

URL = "/v1/chat/completions"


@pytest.fixture
async def server(tmp_path: Path, model_path: Path) -> AsyncIterator[LocalServer]:
    async with local_server(tmp_path, "--model-path", str(model_path), queue_length=2) as server:
        async with server.client() as client:
            await apoll(lambda: is_ready(client))
        yield server


async def is_ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/ready")).status_code == 200


async def num_in(client: httpx.AsyncClient, gauge: str) -> int:
    text = (await client.get("/metrics")).text
    return int(float(text.split(f'specter_num_requests_{gauge}{{model_name="demo"}} ')[1].split()[0]))


async def expect(client: httpx.AsyncClient, running: int, waiting: int) -> None:
    async def arrived() -> bool:
        return (await num_in(client, "running"), await num_in(client, "waiting")) == (running, waiting)

    await apoll(arrived)


async def test_leaving_a_stream(server: LocalServer) -> None:
    async with server.client() as client:
        body = chat("x", seed=fake_engine.ENDLESS, stream=True)
        async with client.stream("POST", URL, json=body) as response:
            await anext(response.aiter_lines())
        await expect(client, 0, 0)
        await apoll(lambda: server.log.messages("Abort"))
        assert (await client.post(URL, json=chat("y"))).json()["choices"][0]["finish_reason"] == "stop"
        assert len(server.log.messages("Abort")) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_token(server: LocalServer, stream: bool) -> None:
    async with server.client() as client:
        body = chat("x", seed=fake_engine.SILENT, stream=stream)
        request = asyncio.create_task(client.post(URL, json=body))
        await apoll(lambda: server.log.messages("Submit"))
        request.cancel()
        await asyncio.wait({request})
        await expect(client, 0, 0)
        await apoll(lambda: server.log.messages("Abort"))


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_the_queue(server: LocalServer, stream: bool) -> None:
    async with server.client() as client:
        running = asyncio.create_task(client.post(URL, json=chat("a", seed=fake_engine.SILENT)))
        await expect(client, 1, 0)
        waiting = asyncio.create_task(client.post(URL, json=chat("b", stream=stream)))
        await expect(client, 1, 1)
        waiting.cancel()
        await expect(client, 1, 0)
        running.cancel()
        await expect(client, 0, 0)
        await asyncio.wait({running, waiting})
        await apoll(lambda: server.log.messages("Abort"))
        # The one that waited never reached the engine.
        assert len(server.log.messages("Submit")) == len(server.log.messages("Abort")) == 1


async def test_full_queue_refuses_and_then_serves_in_order(server: LocalServer) -> None:
    async with server.client() as client:
        first = asyncio.create_task(client.post(URL, json=chat("a", seed=fake_engine.SILENT)))
        await expect(client, 1, 0)
        others = []
        for i in range(2):
            others.append(asyncio.create_task(client.post(URL, json=chat(f"{i}", stream=i == 0))))
            await expect(client, 1, i + 1)
        for stream in (False, True):
            refused = await client.post(URL, json=chat("x", stream=stream))
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "queue_full"
            assert int(refused.headers["retry-after"]) >= 1
        first.cancel()
        streamed, whole = await asyncio.gather(*others)
        assert "0" in "".join(e["choices"][0]["delta"].get("content", "") for e in events(streamed.text))
        assert "1" in whole.json()["choices"][0]["message"]["content"]
        # The prompt is <|im_start|>user\n0: its seventh token tells the two apart, in the order of their bytes.
        tokens = [message["prompt_token_ids"][6] for message in server.log.messages("Submit")[1:]]
        assert tokens == sorted(tokens)


async def test_clients_at_once_never_mix(server: LocalServer) -> None:
    async def ask(text: str) -> bool:
        async with server.client() as client:

            async def answered() -> httpx.Response | None:
                response = await client.post(URL, json=chat(text, stream=True))
                return response if response.status_code == 200 else None

            streamed = events((await apoll(answered)).text)
            content = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in streamed)
            return content == f"user\n{text}\nassistant\n"

    assert all(await asyncio.gather(*(ask(f"{letter}" * 20) for letter in "abcdefgh")))
