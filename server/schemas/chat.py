"""Bodies of /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from server.output import FinishReason
from server.schemas.common import GenerationRequest, Usage, only


def _text(content: Any) -> str:
    """Chat templates take strings; parts are lines."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("The content of a message must be a string, a list of text parts, or null.")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"Content of type {kind!r:.100} is not supported by this server; only text parts are.")
    return "\n".join(part["text"] for part in content)


def _role(role: Any) -> Any:
    if role in ("tool", "function"):
        raise ValueError(f"Messages with the role {role!r} are not supported by this server.")
    return role


class Message(BaseModel):
    """Fields beyond these reach the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, BeforeValidator(_role)]
    content: Annotated[str, BeforeValidator(_text)] = ""
    tool_calls: Annotated[Any, only(None, [])] = Field(None, exclude=True)
    function_call: Annotated[Any, only(None)] = Field(None, exclude=True)


class ChatCompletionRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    chat_template_kwargs: dict[str, Any] | None = None

    top_logprobs: Annotated[Any, only(None, 0)] = None
    tools: Annotated[Any, only(None, [])] = None
    tool_choice: Annotated[Any, only(None, "none", "auto")] = None
    functions: Annotated[Any, only(None, [])] = None
    function_call: Annotated[Any, only(None, "none", "auto")] = None
    modalities: Annotated[Any, only(None, ["text"])] = None
    audio: Annotated[Any, only(None)] = None
    prediction: Annotated[Any, only(None)] = None
    reasoning_effort: Annotated[Any, only(None)] = None
    web_search_options: Annotated[Any, only(None)] = None


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: int = 0
    message: AnswerMessage
    logprobs: None = None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None = None


class ChatDelta(BaseModel):
    """What is left out is not sent."""

    role: Literal["assistant"] | None = Field(None, exclude_if=lambda role: role is None)
    content: str | None = Field(None, exclude_if=lambda content: content is None)


class ChatChunkChoice(BaseModel):
    index: int = 0
    delta: ChatDelta
    logprobs: None = None
    finish_reason: FinishReason | None = None


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    system_fingerprint: None = None
