"""Every failure as the API shows it: `{"error": {"message", "type", "param", "code"}}`. Tracebacks stay in the log."""

import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from engine.errors import ContextLengthError, EngineDiedError, RequestError, RequestFailedError
from server.admission import QueueFullError

INTERNAL_ERROR = "internal_error"


class ApiError(Exception):
    """An answer other than success; `retry_after_seconds` where trying again makes sense."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_seconds is None else {"Retry-After": str(self.retry_after_seconds)}

    @property
    def type(self) -> str:
        if self.status < 500:
            return "invalid_request_error"
        return "service_unavailable" if self.status == HTTPStatus.SERVICE_UNAVAILABLE else "server_error"

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def to_api_error(error: Exception) -> ApiError:
    """What a client is told about the error; logging one that nobody expected is the caller's."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return ApiError(400, str(error), code="context_length_exceeded", param="messages")
        case QueueFullError():
            return ApiError(503, "Too many requests are waiting. Try again.", code="queue_full", retry_after_seconds=1)
        case EngineDiedError():
            return ApiError(503, str(error), code="engine_died")
        case RequestFailedError():
            return ApiError(500, str(error), code="engine_error")
        case RequestError():
            return ApiError(400, str(error))
        case HTTPException():
            return ApiError(error.status_code, error.detail)
        case RequestValidationError():
            return _validation_error(error.errors())
    return ApiError(500, "The server has made an error; its log says more.", code=INTERNAL_ERROR)


def shutting_down() -> ApiError:
    return ApiError(503, "The server is shutting down.", code="shutting_down")


def install_error_handlers(app: FastAPI) -> None:
    for kind in (ApiError, RequestError, EngineDiedError, QueueFullError, RequestValidationError, Exception):
        app.add_exception_handler(kind, _respond)
    app.add_exception_handler(HTTPException, _respond_http)


class ErrorResponse(JSONResponse):
    """In ASCII: the message may quote from the request what UTF-8 cannot say, such as half of a surrogate pair."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> ErrorResponse:
    return ErrorResponse(error.body(), error.status, headers={**(headers or {}), **error.headers})


async def _respond(request: Request, error: Exception) -> ErrorResponse:
    return error_response(to_api_error(error))


async def _respond_http(request: Request, error: Exception) -> ErrorResponse:
    assert isinstance(error, HTTPException)
    api_error = to_api_error(error)
    if error.status_code in (404, 405) and error.detail == HTTPStatus(error.status_code).phrase:
        problem = "No such endpoint" if error.status_code == 404 else "This endpoint does not take the method"
        api_error = ApiError(error.status_code, f"{problem}: {request.method} {request.url.path}")
    return error_response(api_error, dict(error.headers or {}))


def _validation_error(problems: Sequence[Any]) -> ApiError:
    """The first problem, as a sentence with its place, such as `messages[0].content`."""
    problem = problems[0]
    param = _path(problem["loc"][1:])
    if problem["type"] == "json_invalid":
        detail = f"{problem['ctx']['error']} at character {problem['loc'][1]}"
        return ApiError(400, f"The body is not valid JSON: {detail}.", code="invalid_json")
    if not param:
        return ApiError(400, "The body must be a JSON object, sent with 'Content-Type: application/json'.")
    if problem["type"] == "value_error":
        return ApiError(400, str(problem["ctx"]["error"]), param=param)
    if problem["type"] == "missing":
        return ApiError(400, f"'{param}' is required.", param=param, code="missing_required_parameter")
    shown = repr(problem["input"])
    shown = shown if len(shown) <= 100 else shown[:100] + "..."
    reason = problem["msg"][0].lower() + problem["msg"][1:]
    return ApiError(400, f"'{param}' is {shown}, which cannot be used: {reason}.", param=param, code="invalid_value")


def _path(parts: Sequence[str | int]) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return path.removeprefix(".")
