"""The application without an engine: what it says when something goes wrong inside."""

from typing import Any, cast

import httpx
import pytest

from engine.errors import EngineDiedError
from engine.protocol import SamplingParams
from server.app import create_app
from server.generation import Generator
from server.state import ServerState
from tests.server.harness import chat

pytestmark = pytest.mark.anyio


class BrokenGenerator:
    default_sampling = SamplingParams()

    async def chat(self, *arguments: Any) -> None:
        raise RuntimeError("a secret")


def client(state: ServerState) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(state), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.mark.parametrize("stream", [False, True])
async def test_unexpected_error(stream: bool) -> None:
    state = ServerState("demo", queue_length=1, default_max_tokens=None)
    state.ready(cast(Generator, BrokenGenerator()))
    async with client(state) as http:
        response = await http.post("/v1/chat/completions", json=chat("x", stream=stream))
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text


async def test_dead_engine() -> None:
    state = ServerState("demo", queue_length=1, default_max_tokens=None)
    state.engine_died(EngineDiedError("The engine process ended with exit status 3."))
    async with client(state) as http:
        for method, path in [("GET", "/health"), ("GET", "/ready"), ("GET", "/v1/models"), ("POST", "/v1/completions")]:
            response = await http.request(method, path)
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "The engine process ended with exit status 3."
        metrics = (await http.get("/metrics")).text
    assert 'specter_admission_rejections_total{model_name="demo",reason="engine_died"} 2.0' in metrics
