"""Waiting for two things, for the first of two, or only for so long."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")


async def unless(event: Coroutine[Any, Any, Any], work: Coroutine[Any, Any, T]) -> T | None:
    """The work's result, or None where the event comes first; whichever is not over is cancelled, and awaited."""
    working = asyncio.create_task(work)
    waiting = asyncio.create_task(event)
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        waiting.cancel()
        await asyncio.wait({working, waiting})


async def both(first: Coroutine[Any, Any, T], second: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """Both results; where one fails or the caller is cancelled, whatever is not over is cancelled, and awaited."""
    tasks = asyncio.create_task(first), asyncio.create_task(second)
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def within(seconds: float, work: Coroutine[Any, Any, Any]) -> None:
    """Do the work, for so long at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work
