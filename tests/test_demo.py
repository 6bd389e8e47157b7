"""The whole of it, for real: the demo model behind `specter serve`, talked to with the OpenAI SDK."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from openai.types.chat import ChatCompletionMessageParam
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.demo import build_demo
from server.settings import load_settings
from tests.server.harness import poll

START_SECONDS = 400.0
"""Building and packing the demo for the first time takes about a minute, on a busy machine several."""

FRANCE = "What is the capital of France? Answer briefly."


@pytest.fixture(scope="module")
def demo() -> Path:
    """Where `make serve` keeps the demo model, so that it is built once per machine."""
    return build_demo(load_settings({}).cache.expanduser(), lambda loading: None)


@pytest.fixture(scope="module")
def url(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    output = tmp_path_factory.mktemp("demo") / "output"
    with output.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "server", "serve", "--port", "0"], stdout=file, stderr=file)
    try:
        lines = poll(lambda: [line for line in output.read_text().splitlines() if "Ready on" in line], START_SECONDS)
        yield lines[0].split()[2]
        process.terminate()
        assert process.wait(START_SECONDS) == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def messages(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def reply(client: openai.OpenAI, text: str, max_tokens: int = 40) -> str:
    completion = client.chat.completions.create(
        model="demo", messages=messages(text), temperature=0, max_tokens=max_tokens
    )
    return completion.choices[0].message.content or ""


def test_the_capital_of_france_streamed_and_not(client: openai.OpenAI) -> None:
    whole = reply(client, FRANCE)
    assert "Paris" in whole
    stream = client.chat.completions.create(model="demo", messages=messages(FRANCE), temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole


def test_the_text_is_that_of_transformers(client: openai.OpenAI, demo: Path) -> None:
    prompt = "Name three things to pack for a rainy hike, with a reason for each."
    tokenizer: Any = AutoTokenizer.from_pretrained(demo)
    model: Any = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(
        messages(prompt), add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False, temperature=None, top_p=None)
    expected = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert reply(client, prompt) == expected


def test_the_metrics_tell_of_the_draft_the_transfers_and_the_time_per_token(client: openai.OpenAI, url: str) -> None:
    reply(client, FRANCE)
    lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
    for name in (
        'specter_spec_decode_num_accepted_tokens_total{model_name="demo"}',
        'specter_expert_transfer_bytes_total{kind="prefetch",model_name="demo"}',
        'specter_request_time_per_output_token_seconds_count{model_name="demo"}',
    ):
        assert values[name] > 0
