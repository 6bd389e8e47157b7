import httpx
import openai

from server import __version__
from tests.server.fake_engine import MAX_MODEL_LEN
from tests.server.harness import ServerProcess


def test_models(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        (model,) = sdk.models.list().data
        assert (model.id, model.object) == ("demo", "model")
        assert model.max_model_len == MAX_MODEL_LEN  # type: ignore[attr-defined]
        assert sdk.models.retrieve("demo") == model


def test_health_ready_and_version(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}
    assert client.get("/version").json() == {"version": __version__}


def test_memory_table_and_curl_line_are_printed(server: ServerProcess) -> None:
    assert server.url
    output = server.output.read_text()
    assert "expert slots" in output
    assert "of a budget of 2.0 MB" in output
    assert "- Drafting with qint4 experts: the test says so." in output
    assert f"curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{" in output
