import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.server.harness import SECONDS, ServerProcess, server_process

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'critic' -%}{{ raise_exception('Critics are not welcome.') }}{%- endif -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}{{ suffix or '' }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a token per byte, so that every character beyond ASCII lies in several tokens."""
    path = tmp_path_factory.mktemp("model")
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    wrap: Any = PreTrainedTokenizerFast
    wrap(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE).save_pretrained(path)
    sampling = {"do_sample": True, "temperature": 0.5, "top_k": 7}
    (path / "generation_config.json").write_text(json.dumps(sampling))
    return path


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[ServerProcess]:
    """One `specter serve` for all tests that leave it as it was."""
    folder = tmp_path_factory.mktemp("server")
    with server_process(folder, "serve", "--port", "0", engine=("--model-path", str(model_path))) as running:
        assert running.url
        yield running
        assert running.stop() == 0
        assert "Traceback" not in running.output.read_text()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        yield client
