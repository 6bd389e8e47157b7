"""The model's tokenizer and chat template. Importing this module imports transformers, which takes seconds."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from engine.errors import RequestError, UnsupportedModelError


class TemplateRefusedError(RequestError):
    """The chat template does not take these messages; carries its own words."""


class Tokenizer:
    """Thread-safe: nothing here changes after loading."""

    def __init__(self, model_path: Path) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model_path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            # What it says may have many lines.
            reason = " ".join(str(error).split())
            raise UnsupportedModelError(f"The tokenizer in {model_path} cannot be loaded: {reason}") from error
        added = self._tokenizer.added_tokens_decoder
        self._reserved_kwargs = frozenset(inspect.signature(self._tokenizer.apply_chat_template).parameters)
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises RequestError for text with a lone surrogate, which JSON can say and UTF-8 cannot."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = f"U+{ord(text[error.start]):04X}"
            raise RequestError(f"The prompt has {code}, half of a surrogate pair; send whole characters.") from None
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def apply_chat_template(self, messages: list[dict[str, Any]], template_kwargs: dict[str, Any]) -> list[int]:
        """Token ids of the conversation and the start of the answer; raises TemplateRefusedError."""
        if not self._tokenizer.chat_template:
            raise TemplateRefusedError("This model has no chat template; use /v1/completions.")
        if reserved := self._reserved_kwargs & template_kwargs.keys():
            raise RequestError(f"'chat_template_kwargs.{min(reserved)}' is not a variable of the chat template.")
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **template_kwargs
            )
        except TemplateError as error:
            raise TemplateRefusedError(f"The model's chat template refuses the messages: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            # Templates are programs that expect certain messages; what they trip over is in the request.
            raise TemplateRefusedError(f"The model's chat template fails on the messages: {error}") from error
        # The template writes the special tokens that it wants itself.
        return self.encode(str(text), add_special_tokens=False)
