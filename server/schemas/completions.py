"""Bodies of /v1/completions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator

from server.output import FinishReason
from server.schemas.common import GenerationRequest, Usage, only

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for text completions, which have no natural end."""


def _prompt(value: Any) -> Any:
    """One prompt, as text or token ids; a batch of one is taken as that one."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError(f"'prompt' holds {len(value)} prompts; this server takes one per request.")
        value = value[0]
    if isinstance(value, str):
        return value
    # A switch is an `int` too, and not a token.
    if isinstance(value, list) and all(type(token_id) is int and token_id >= 0 for token_id in value):
        return value
    raise ValueError("'prompt' must be a string or a list of token ids.")


class CompletionRequest(GenerationRequest):
    prompt: Annotated[str | list[int], BeforeValidator(_prompt)]

    echo: Annotated[Any, only(None, False)] = None
    suffix: Annotated[Any, only(None, "")] = None
    best_of: Annotated[Any, only(None, 1)] = None


class CompletionChoice(BaseModel):
    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None


class Completion(BaseModel):
    """The whole answer, or one chunk of a stream, which has usage only where it was asked for."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: None = None
