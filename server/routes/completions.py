"""POST /v1/completions."""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from server.disconnect import unless_disconnected
from server.generation import Generation
from server.routes.common import State, check_model, collect, generation_options, usage_of
from server.schemas.common import Usage
from server.schemas.completions import DEFAULT_MAX_TOKENS, Completion, CompletionChoice, CompletionRequest
from server.state import ServerState
from server.streaming import EventStream

router = APIRouter()


@router.post("/v1/completions", response_model=Completion)
async def create_completion(body: CompletionRequest, request: Request, state: State) -> Response:
    check_model(body.model, state)
    if not body.stream:
        return await unless_disconnected(request, _complete(body, state))
    generation = await _start(body, state)
    return EventStream(_chunks(body, generation, state), generation, with_usage=body.include_usage)


async def _start(body: CompletionRequest, state: ServerState) -> Generation:
    max_tokens = body.max_tokens or state.default_max_tokens or DEFAULT_MAX_TOKENS
    return await state.generator.complete(body.prompt, generation_options(body, max_tokens, state))


async def _complete(body: CompletionRequest, state: ServerState) -> Response:
    generation = await _start(body, state)
    answer = await collect(generation.deltas())
    completion = Completion(
        id=_completion_id(),
        created=int(time.time()),
        model=state.model_name,
        choices=[CompletionChoice(text=answer.text, finish_reason=answer.finish_reason)],
        usage=usage_of(generation),
    )
    return JSONResponse(completion.model_dump())


async def _chunks(
    body: CompletionRequest, generation: Generation, state: ServerState
) -> AsyncGenerator[Completion, None]:
    completion_id, created = _completion_id(), int(time.time())

    def chunk(*choices: CompletionChoice, usage: Usage | None = None) -> Completion:
        return Completion(id=completion_id, created=created, model=state.model_name, choices=list(choices), usage=usage)

    async with aclosing(generation.deltas()) as deltas:
        async for text, finish_reason in deltas:
            if text:
                yield chunk(CompletionChoice(text=text, finish_reason=None))
            if finish_reason:
                yield chunk(CompletionChoice(text="", finish_reason=finish_reason))
    if body.include_usage:
        yield chunk(usage=usage_of(generation))


def _completion_id() -> str:
    return f"cmpl-{uuid.uuid4().hex}"
