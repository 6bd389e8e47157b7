"""The HTTP application."""

from fastapi import FastAPI

from server import __version__
from server.errors import install_error_handlers
from server.gate import Gate
from server.routes import chat, completions, health, models
from server.state import ServerState


def create_app(state: ServerState) -> FastAPI:
    app = FastAPI(title="Specter", version=__version__)
    app.state.server = state
    app.add_middleware(Gate, state=state)
    install_error_handlers(app)
    for module in (chat, completions, models, health):
        app.include_router(module.router)
    return app
