"""Every failure has OpenAI's error body, with one sentence that names what is wrong."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from server.gate import MAX_BODY_BYTES
from tests.server.fake_engine import MAX_MODEL_LEN
from tests.server.harness import ServerProcess, chat

URL = "/v1/chat/completions"


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] is None or isinstance(error["code"], str)
    assert "Traceback" not in response.text
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("n", True),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("reasoning_effort", "low"),
    ],
)
def test_unsupported_field_is_named(client: httpx.Client, field: str, value: object) -> None:
    error = error_of(client.post(URL, json=chat("x", **{field: value})))
    assert error["param"] == field
    assert f"'{field}' = {value!r} is not supported" in error["message"]


@pytest.mark.parametrize(("field", "value"), [("echo", True), ("suffix", "x"), ("best_of", 2), ("logprobs", 0)])
def test_unsupported_field_of_completions(client: httpx.Client, field: str, value: object) -> None:
    assert error_of(client.post("/v1/completions", json={"prompt": "x", field: value}))["param"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_k", -2),
        ("top_k", 2**70),
        ("min_p", 2),
        ("max_tokens", 0),
        ("max_completion_tokens", "many"),
        ("seed", 2**64),
        ("stop", [""]),
        ("stop", 5),
        ("stream", "perhaps"),
        ("stream_options", 1),
        ("messages", []),
        ("messages", "hello"),
        ("messages", [{"content": "x"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "tool", "content": "x"}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"id": "1"}]}]),
        ("model", 5),
    ],
)
def test_wrong_value_is_named(client: httpx.Client, field: str, value: object) -> None:
    error = error_of(client.post(URL, json=chat("x") | {field: value}))
    assert error["param"].startswith(field)
    assert error["type"] == "invalid_request_error"


def test_place_of_a_problem_within_messages(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "audio"}]}]}
    error = error_of(client.post(URL, json=body))
    assert error["param"] == "messages[1].content"
    assert "'audio'" in error["message"]


def test_missing_messages(client: httpx.Client) -> None:
    assert error_of(client.post(URL, json={}))["message"] == "'messages' is required."


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[1]", b"", b'{"messages": NaN}'])
def test_undecodable_bodies(client: httpx.Client, body: bytes) -> None:
    error_of(client.post(URL, content=body, headers={"Content-Type": "application/json"}))


def test_json_without_its_content_type(client: httpx.Client) -> None:
    error = error_of(client.post(URL, data={"a": "b"}))
    assert "Content-Type: application/json" in error["message"]


def test_unknown_model_names_the_served_one(client: httpx.Client) -> None:
    error = error_of(client.post(URL, json=chat("x") | {"model": "gpt"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'demo'" in error["message"]


def test_unknown_endpoint_and_method(client: httpx.Client) -> None:
    assert "POST /v1/chats" in error_of(client.post("/v1/chats"), 404)["message"]
    response = client.get(URL)
    assert "GET /v1/chat/completions" in error_of(response, 405)["message"]
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_beyond_the_context(client: httpx.Client, stream: bool) -> None:
    error = error_of(client.post(URL, json=chat("x" * MAX_MODEL_LEN, stream=stream)))
    assert error["code"] == "context_length_exceeded"
    num_tokens = MAX_MODEL_LEN + len("user\n\nassistant\n") + 3
    assert error["message"].startswith(
        f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, you requested {num_tokens} tokens"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_template_refuses(client: httpx.Client, stream: bool) -> None:
    body = {"messages": [{"role": "critic", "content": "x"}], "stream": stream}
    assert "Critics are not welcome." in error_of(client.post(URL, json=body))["message"]


def test_client_may_not_bring_its_own_template(client: httpx.Client) -> None:
    error = error_of(client.post(URL, json=chat("x", chat_template_kwargs={"chat_template": "{{ 1 }}"})))
    assert "chat_template_kwargs.chat_template" in error["message"]


def test_sdk_raises_its_own_types(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        with pytest.raises(openai.NotFoundError, match="'demo'"):
            sdk.models.retrieve("gpt")
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.completions.create(model="demo", prompt="x", best_of=3)
        assert caught.value.param == "best_of"


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (URL, r'{"messages": [{"role": "user", "content": "\ud800"}]}'),
        (URL, r'{"messages": [{"role": "user", "content": "\ud800"}], "stream": true}'),
        (URL, r'{"messages": [{"role": "\udc00", "content": "x"}]}'),
        (URL, r'{"messages": [{"role": "user", "content": "x"}], "stop": "\ud800"}'),
        ("/v1/completions", r'{"prompt": "x\ud800"}'),
    ],
)
def test_half_of_a_surrogate_pair_is_the_requests_fault(client: httpx.Client, url: str, body: str) -> None:
    error_of(client.post(url, content=body, headers={"Content-Type": "application/json"}))


def test_error_that_quotes_half_of_a_surrogate_pair(client: httpx.Client) -> None:
    body = r'{"messages": [{"role": "user", "content": "x"}], "model": "\ud800"}'
    response = client.post(URL, content=body, headers={"Content-Type": "application/json"})
    assert error_of(response, 404)["message"].startswith("The model '\ud800' is not served here")


@pytest.mark.parametrize("is_chunked", [False, True])
def test_body_that_is_too_large(client: httpx.Client, is_chunked: bool) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"messages": [{"role": "user", "content": "'
        yield b"x" * MAX_BODY_BYTES
        yield b'"}]}'

    headers = {"Content-Type": "application/json"}
    content: Iterator[bytes] | bytes = pieces() if is_chunked else b"".join(pieces())
    error = error_of(client.post(URL, content=content, headers=headers), 413)
    assert str(MAX_BODY_BYTES) in error["message"]
