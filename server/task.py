"""A task of the engine process that ends with its answer: a model prepared, packed or planned, not served."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.protocol import OnProgress, Task
from server.progress import LoadProgress
from server.waiting import within

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""For the engine process to end by itself, once it is done or told to."""


async def run_task(
    task: Task,
    config: EngineConfig,
    wait: Callable[[EngineClient, OnProgress], Awaitable[T]],
    engine_command: Sequence[str] | None = None,
) -> T:
    """Have the engine process do the task, and `wait` for its answer, such as with `EngineClient.wait_prepared`.

    Progress goes to stderr; raises the SpecterError that the task failed with.
    """
    engine = await EngineClient.start(config, task, engine_command)
    try:
        with LoadProgress() as show:
            answer = await wait(engine, show)
        await within(GRACE_SECONDS, engine.died.wait())
        return answer
    finally:
        await engine.close(GRACE_SECONDS)
