"""POST /v1/completions against a real server; the fake engine echoes the prompt."""

import httpx
import openai
import pytest

from tests.server.harness import ServerProcess, events


def post(client: httpx.Client, **body: object) -> httpx.Response:
    return client.post("/v1/completions", json=body)


@pytest.mark.parametrize("prompt", ["héllo", ["héllo"], list(range(60, 66)), [list(range(60, 66))]])
def test_answer_and_stream(client: httpx.Client, prompt: object) -> None:
    whole = post(client, prompt=prompt).json()
    assert whole["object"] == "text_completion"
    assert whole["usage"] == {"prompt_tokens": 6, "completion_tokens": 7, "total_tokens": 13}
    stream = post(client, prompt=prompt, stream=True, stream_options={"include_usage": True})
    *chunks, last = events(stream.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "stop"
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


def test_text_survives(client: httpx.Client) -> None:
    assert post(client, prompt="héllo 🙂").json()["choices"][0]["text"] == "héllo 🙂"


def test_default_length_is_that_of_openai(client: httpx.Client) -> None:
    answer = post(client, prompt="x" * 100).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_special_tokens_in_the_output_have_no_text(client: httpx.Client) -> None:
    assert post(client, prompt="a<|im_start|>b").json()["choices"][0]["text"] == "ab"


def test_sdk(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        assert sdk.completions.create(model="demo", prompt="abc").choices[0].text == "abc"
        stream = sdk.completions.create(model="demo", prompt="abc", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "abc"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([], "empty"),
        (["a", "b"], "2 prompts"),
        ([1, "a"], "string or a list of token ids"),
        ([True], "string or a list of token ids"),
        ([258], "beyond the vocabulary of 258"),
        (None, "string or a list of token ids"),
    ],
)
def test_unusable_prompts(client: httpx.Client, prompt: object, words: str) -> None:
    response = post(client, prompt=prompt)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
