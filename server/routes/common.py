"""What the routes of the model share."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, NamedTuple

from fastapi import Depends, Request

from server.errors import ApiError
from server.generation import Delta, Generation, GenerationOptions
from server.output import FinishReason
from server.schemas.common import GenerationRequest, Usage
from server.state import ServerState


def _state(request: Request) -> ServerState:
    state = request.app.state.server
    assert isinstance(state, ServerState)
    return state


State = Annotated[ServerState, Depends(_state)]


class Answer(NamedTuple):
    text: str
    finish_reason: FinishReason


def check_model(name: str | None, state: ServerState) -> None:
    """Raises where the request names a model that is not served."""
    if name is not None and name != state.model_name:
        message = f"The model '{name}' is not served here; '{state.model_name}' is."
        raise ApiError(404, message, code="model_not_found", param="model")


def generation_options(body: GenerationRequest, max_tokens: int | None, state: ServerState) -> GenerationOptions:
    return GenerationOptions(
        max_tokens=max_tokens,
        stop=body.stop,
        sampling=body.sampling(state.generator.default_sampling),
        ignore_eos=bool(body.ignore_eos),
    )


async def collect(deltas: AsyncGenerator[Delta, None]) -> Answer:
    """The whole answer, from the same deltas that a stream sends."""
    text = ""
    async with aclosing(deltas):
        async for delta in deltas:
            text += delta.text
            if delta.finish_reason:
                return Answer(text, delta.finish_reason)
    raise AssertionError("the last delta has a finish reason")


def usage_of(generation: Generation) -> Usage:
    return Usage(
        prompt_tokens=generation.num_prompt_tokens,
        completion_tokens=generation.num_output_tokens,
        total_tokens=generation.num_prompt_tokens + generation.num_output_tokens,
    )
