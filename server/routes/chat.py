"""POST /v1/chat/completions."""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from server.disconnect import unless_disconnected
from server.generation import Generation
from server.routes.common import State, check_model, collect, generation_options, usage_of
from server.schemas.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
)
from server.schemas.common import Usage
from server.state import ServerState
from server.streaming import EventStream

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatCompletion)
async def create_chat_completion(body: ChatCompletionRequest, request: Request, state: State) -> Response:
    check_model(body.model, state)
    if not body.stream:
        return await unless_disconnected(request, _complete(body, state))
    generation = await _start(body, state)
    return EventStream(_chunks(body, generation, state), generation, with_usage=body.include_usage)


async def _start(body: ChatCompletionRequest, state: ServerState) -> Generation:
    max_tokens = body.max_completion_tokens or body.max_tokens or state.default_max_tokens
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    options = generation_options(body, max_tokens, state)
    return await state.generator.chat(messages, body.chat_template_kwargs or {}, options)


async def _complete(body: ChatCompletionRequest, state: ServerState) -> Response:
    generation = await _start(body, state)
    answer = await collect(generation.deltas())
    completion = ChatCompletion(
        id=_completion_id(),
        created=int(time.time()),
        model=state.model_name,
        choices=[ChatChoice(message=AnswerMessage(content=answer.text), finish_reason=answer.finish_reason)],
        usage=usage_of(generation),
    )
    return JSONResponse(completion.model_dump())


async def _chunks(
    body: ChatCompletionRequest, generation: Generation, state: ServerState
) -> AsyncGenerator[ChatCompletionChunk, None]:
    completion_id, created = _completion_id(), int(time.time())

    def chunk(*choices: ChatChunkChoice, usage: Usage | None = None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=completion_id, created=created, model=state.model_name, choices=list(choices), usage=usage
        )

    started = False
    async with aclosing(generation.deltas()) as deltas:
        async for text, finish_reason in deltas:
            if not started:
                # Not earlier: benchmarks take the first chunk for the first token.
                yield chunk(ChatChunkChoice(delta=ChatDelta(role="assistant", content="")))
                started = True
            if text:
                yield chunk(ChatChunkChoice(delta=ChatDelta(content=text)))
            if finish_reason:
                yield chunk(ChatChunkChoice(delta=ChatDelta(), finish_reason=finish_reason))
    if body.include_usage:
        yield chunk(usage=usage_of(generation))


def _completion_id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"
