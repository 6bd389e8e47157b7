"""POST /v1/chat/completions against a real server; the fake engine echoes the rendered prompt."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.server import fake_engine
from tests.server.harness import ServerProcess, chat, events

MESSAGES = [{"role": "user", "content": "größer"}]
TEXTS = ["hello", "größer als 🙂 你好", "line\u2028separator\u0085next", ""]


def rendered(text: str) -> str:
    return f"user\n{text}\nassistant\n"


def post(client: httpx.Client, body: object) -> httpx.Response:
    return client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("text", TEXTS)
def test_answer(client: httpx.Client, text: str) -> None:
    answer = post(client, chat(text)).json()
    num_bytes = len(rendered(text).encode())
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "demo"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": rendered(text)},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    # The prompt has three special tokens; the answer ends with one.
    assert answer["usage"] == {
        "prompt_tokens": num_bytes + 3,
        "completion_tokens": num_bytes + 1,
        "total_tokens": 2 * num_bytes + 4,
    }


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("parameters", [{}, {"max_tokens": 9}, {"stop": ["ass", "zzz"]}, {"stop": "tor"}])
def test_stream_equals_whole_answer(client: httpx.Client, text: str, parameters: dict[str, object]) -> None:
    whole = post(client, chat(text, **parameters)).json()
    response = post(client, chat(text, stream=True, stream_options={"include_usage": True}, **parameters))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.content.isascii()
    *chunks, last = events(response.text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert (
        "".join(choice["delta"].get("content", "") for choice in choices) == whole["choices"][0]["message"]["content"]
    )
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["delta"] == {}
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in [*chunks, last]}) == 1


def test_stream_has_no_usage_unless_asked(client: httpx.Client) -> None:
    chunks = events(post(client, chat("hello", stream=True)).text)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_no_character_is_split(client: httpx.Client) -> None:
    chunks = events(post(client, chat("🙂你é" * 5, stream=True)).text)
    assert not any("\ufffd" in chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def test_cut_character_is_flushed_at_the_end(client: httpx.Client) -> None:
    body = chat("🙂", max_tokens=len("user\n") + 2)
    whole = post(client, body).json()["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("user\n\ufffd", "length")


def test_stop_string_over_several_tokens_is_never_sent(client: httpx.Client) -> None:
    answer = post(client, chat("abcdefghij", stop="defgh")).json()
    assert answer["choices"][0]["message"]["content"] == "user\nabc"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len("user\nabcdefgh")


def test_text_held_back_for_a_stop_string_is_flushed(client: httpx.Client) -> None:
    answer = post(client, chat("x", stop="tant\nzzz")).json()
    assert answer["choices"][0]["message"]["content"] == rendered("x")


def test_max_completion_tokens_wins_and_is_clamped(client: httpx.Client) -> None:
    answer = post(client, chat("x", max_tokens=1, max_completion_tokens=4)).json()
    assert answer["usage"]["completion_tokens"] == 4
    answer = post(client, chat("x", max_tokens=10**9)).json()
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_messages_as_parts_null_or_missing(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "user"},
    ]
    answer = post(client, {"messages": messages}).json()
    assert answer["choices"][0]["message"]["content"] == "user\na\nb\nassistant\n\nuser\n\nassistant\n"


def test_template_variables(client: httpx.Client) -> None:
    answer = post(client, chat("x", chat_template_kwargs={"suffix": "!"})).json()
    assert answer["choices"][0]["message"]["content"] == rendered("x!")


def test_sampling_of_the_model_and_of_the_request(client: httpx.Client, server: ServerProcess) -> None:
    post(client, chat("x"))
    post(client, chat("x", temperature=0, top_p=0.9, top_k=-1, min_p=0.1, ignore_eos=True))
    default, asked = server.log.messages("Submit")[-2:]
    assert default["sampling"] == {"temperature": 0.5, "top_k": 7, "top_p": 1.0, "min_p": 0.0, "seed": None}
    assert asked["sampling"] == {"temperature": 0.0, "top_k": 0, "top_p": 0.9, "min_p": 0.1, "seed": None}
    assert (default["ignore_eos"], asked["ignore_eos"]) == (False, True)


def test_values_that_change_nothing_are_accepted(client: httpx.Client) -> None:
    body = chat(
        "x",
        n=1,
        logprobs=False,
        top_logprobs=None,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        response_format={"type": "text"},
        tools=[],
        tool_choice="none",
        user="me",
        made_up_field=[1, 2],
        stop=None,
        seed=None,
        stream=None,
    )
    assert post(client, body).status_code == 200


def test_sdk(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        create: Any = sdk.chat.completions.create
        whole = create(model="demo", messages=MESSAGES)
        assert whole.choices[0].message.content == rendered("größer")
        stream = create(model="demo", messages=MESSAGES, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == rendered("größer")


@pytest.mark.anyio
async def test_async_sdk(server: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        create: Any = sdk.chat.completions.create
        whole = await create(model="demo", messages=MESSAGES)
        assert whole.choices[0].message.content == rendered("größer")
        stream = await create(model="demo", messages=MESSAGES, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == rendered("größer")


@pytest.mark.parametrize(
    ("seed", "status", "code"), [(fake_engine.FAIL, 400, None), (fake_engine.FAULT, 500, "engine_error")]
)
def test_engine_refuses_a_request(client: httpx.Client, seed: int, status: int, code: str | None) -> None:
    response = post(client, chat("x", seed=seed))
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    (error,) = events(post(client, chat("x", seed=seed, stream=True)).text)
    assert error == response.json()
    assert json.dumps(error).startswith('{"error": {"message": "The engine')


def test_error_in_a_stream_raises_in_the_sdk(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        stream = sdk.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "x"}], seed=fake_engine.FAIL, stream=True
        )
        with pytest.raises(openai.APIError, match="The engine refuses this request"):
            list(stream)
