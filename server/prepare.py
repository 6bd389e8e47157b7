"""Fetching or building a model without serving it."""

from collections.abc import Sequence

from engine.client import EngineClient
from engine.config import EngineConfig
from server.console import LoadProgress
from server.waiting import within

GRACE_SECONDS = 5.0
"""For the engine process to end by itself, once it is done or told to."""


async def prepare(config: EngineConfig, engine_command: Sequence[str] | None = None) -> str:
    """Have the engine process prepare the model; returns its directory, raises SpecterError."""
    engine = await EngineClient.start(config, "prepare", engine_command)
    try:
        with LoadProgress() as show:
            model_path = await engine.wait_prepared(show)
        await within(GRACE_SECONDS, engine.died.wait())
        return model_path
    finally:
        await engine.close(GRACE_SECONDS)
