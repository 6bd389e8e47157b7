"""GET /health, /ready, /metrics and /version: for operators, open and independent of the model."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from server import __version__
from server.routes.common import State
from server.state import Phase

router = APIRouter()


@router.get("/health")
async def health(state: State) -> Response:
    """Server and engine live; the model may still be loading."""
    if state.phase is Phase.DEAD and (refusal := state.refusal()):
        return JSONResponse({"status": state.phase, **refusal.body()}, refusal.status)
    return JSONResponse({"status": "ok"})


@router.get("/ready")
async def ready(state: State) -> Response:
    """The model is loaded and new requests are taken."""
    if refusal := state.refusal():
        body = {"status": state.phase, "progress": state.progress_body(), **refusal.body()}
        return JSONResponse(body, refusal.status, headers=refusal.headers)
    return JSONResponse({"status": state.phase})


@router.get("/metrics")
async def metrics(state: State) -> Response:
    return Response(generate_latest(state.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}
