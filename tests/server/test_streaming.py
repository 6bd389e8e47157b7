"""An event stream by itself: what it sends, and that it closes its generation however it ends."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from typing import cast

import pytest
from starlette.types import Message

from server.generation import Generation
from server.schemas.completions import Completion, CompletionChoice
from server.streaming import EventStream

pytestmark = pytest.mark.anyio

SCOPE = {"type": "http", "method": "POST"}


class FakeGeneration:
    closed = False

    def close(self) -> None:
        self.closed = True


def chunk(text: str) -> Completion:
    choices = [CompletionChoice(text=text, finish_reason=None)]
    return Completion(id="1", created=0, model="m", choices=choices)


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def sent(chunks: AsyncGenerator[Completion, None]) -> bytes:
    generation, body = FakeGeneration(), b""

    async def send(message: Message) -> None:
        nonlocal body
        body += message.get("body", b"")

    await EventStream(chunks, cast(Generation, generation), with_usage=False)(SCOPE, never, send)
    assert generation.closed
    return body


async def test_unexpected_error_is_logged_and_told_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    async def chunks() -> AsyncGenerator[Completion, None]:
        yield chunk("a")
        raise RuntimeError("a secret")

    with caplog.at_level(logging.ERROR):
        _, error, done = (await sent(chunks())).decode().removesuffix("\n\n").split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert "secret" not in error
    assert done == "data: [DONE]"
    assert "a secret" in caplog.text


async def test_only_ascii_and_newlines_separate() -> None:
    async def chunks() -> AsyncGenerator[Completion, None]:
        yield chunk("\u2028\u0085\r\né")

    body = await sent(chunks())
    assert body.isascii()
    assert b"\r" not in body
    assert body.count(b"\n") == 4


async def test_comments_keep_a_silent_stream_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.streaming.KEEPALIVE_SECONDS", 0.005)
    comments = asyncio.Event()

    async def chunks() -> AsyncGenerator[Completion, None]:
        await comments.wait()
        yield chunk("a")

    async def send(message: Message) -> None:
        if message.get("body") == b": keepalive\n\n":
            comments.set()

    stream = EventStream(chunks(), cast(Generation, FakeGeneration()), with_usage=False)
    await asyncio.wait_for(stream(SCOPE, never, send), 5)


async def test_generation_of_a_stream_that_never_started_is_closed() -> None:
    async def chunks() -> AsyncGenerator[Completion, None]:
        yield chunk("a")

    async def send(message: Message) -> None:
        raise OSError("the client has left")

    generation = FakeGeneration()
    with pytest.raises(OSError, match="has left"):
        await EventStream(chunks(), cast(Generation, generation), with_usage=False)(SCOPE, never, send)
    assert generation.closed
