"""Engines of several modes side by side, as far as there is memory for them."""

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar


class Closable(Protocol):
    async def close(self) -> None:
        """Release everything; idempotent."""


EngineT = TypeVar("EngineT", bound=Closable)


def num_side_by_side(engine_bytes: int, free_bytes: int) -> int:
    """Engines that fit together, and one in any case."""
    return max(1, free_bytes // engine_bytes)


class EnginePool(Generic[EngineT]):
    """Starts an engine on first use, and closes the least recently used ones where there would be too many.

    Mutable; an asynchronous context manager that closes all in the end. Keys are whatever tells engines apart.
    """

    def __init__(self, start: Callable[[str], Awaitable[EngineT]], max_engines: int) -> None:
        self._start = start
        self._max_engines = max_engines
        self._engines: dict[str, EngineT] = {}
        """The least recently used one first."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def get(self, key: str) -> EngineT:
        """The engine, started where it is not running; raises what the start raises, and then there is none."""
        if key in self._engines:
            self._engines[key] = self._engines.pop(key)
            return self._engines[key]
        while len(self._engines) >= self._max_engines:
            await self.discard(next(iter(self._engines)))
        self._engines[key] = await self._start(key)
        return self._engines[key]

    async def discard(self, key: str) -> None:
        """Close the engine, if it is running."""
        if engine := self._engines.get(key):
            await engine.close()
            del self._engines[key]

    async def close(self) -> None:
        for key in list(self._engines):
            await self.discard(key)
