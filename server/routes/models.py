"""GET /v1/models and /v1/models/{id}."""

from fastapi import APIRouter

from server.routes.common import State, check_model
from server.schemas.models import Model, ModelList
from server.state import ServerState

router = APIRouter()


@router.get("/v1/models")
async def list_models(state: State) -> ModelList:
    return ModelList(data=[_served_model(state)])


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(model_id: str, state: State) -> Model:
    check_model(model_id, state)
    return _served_model(state)


def _served_model(state: ServerState) -> Model:
    return Model(id=state.model_name, created=state.created, max_model_len=state.generator.max_model_len)
