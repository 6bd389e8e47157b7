import shutil
from pathlib import Path

import pytest

from engine.errors import UnsupportedModelError
from server.tokenizer import TemplateRefusedError, Tokenizer


def test_special_tokens_are_skipped(model_path: Path) -> None:
    tokenizer = Tokenizer(model_path)
    assert tokenizer.special_token_ids == {256, 257}
    token_ids = tokenizer.encode("<|im_start|>a é")
    assert token_ids[0] == 256
    assert tokenizer.decode(token_ids) == "a é"


def test_template_starts_the_answer(model_path: Path) -> None:
    tokenizer = Tokenizer(model_path)
    token_ids = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], {})
    assert token_ids == tokenizer.encode("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n")


def test_template_that_trips_is_the_requests_fault(model_path: Path) -> None:
    tokenizer = Tokenizer(model_path)
    tokenizer._tokenizer.chat_template = "{{ messages[0].content + messages[0].missing.thing }}"
    with pytest.raises(TemplateRefusedError, match="refuses the messages"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], {})
    tokenizer._tokenizer.chat_template = "{{ messages[0].content + 1 }}"
    with pytest.raises(TemplateRefusedError, match="fails on the messages"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], {})


def test_model_without_a_template(model_path: Path) -> None:
    tokenizer = Tokenizer(model_path)
    tokenizer._tokenizer.chat_template = None
    with pytest.raises(TemplateRefusedError, match="/v1/completions"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], {})


def test_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=str(tmp_path)) as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["garbage", "[]"])
def test_damaged_tokenizer(model_path: Path, tmp_path: Path, file: str, content: str) -> None:
    shutil.copytree(model_path, tmp_path, dirs_exist_ok=True)
    (tmp_path / file).write_text(content)
    with pytest.raises(UnsupportedModelError, match=str(tmp_path)):
        Tokenizer(tmp_path)
