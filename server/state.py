"""What the routes share: the phase of the server, the queue, and the generator once the model is loaded."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from engine.errors import EngineDiedError
from engine.protocol import Loading
from server.admission import Admission
from server.errors import ApiError, shutting_down
from server.generation import Generator
from server.metrics import Metrics


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class ServerState:
    """Mutable; belongs to one event loop. LOADING -> READY -> DRAINING, and DEAD from anywhere."""

    def __init__(self, model_name: str, queue_length: int, default_max_tokens: int | None) -> None:
        self.model_name = model_name
        self.default_max_tokens = default_max_tokens
        self.created = int(time.time())
        self.metrics = Metrics(model_name)
        self.admission = Admission(queue_length)
        self.metrics.watch_queue(lambda: self.admission.num_running, lambda: self.admission.num_waiting)
        self.phase = Phase.LOADING
        self.progress: Loading | None = None
        self._generator: Generator | None = None
        self._death: EngineDiedError | None = None
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def generator(self) -> Generator:
        assert self._generator is not None, "the gate lets no request through before the model is loaded"
        return self._generator

    def ready(self, generator: Generator) -> None:
        self._generator = generator
        self.phase = Phase.READY

    def drain(self) -> None:
        """Refuse new requests; those in flight go on."""
        self.phase = Phase.DRAINING

    def engine_died(self, error: EngineDiedError) -> None:
        self._death = error
        self.phase = Phase.DEAD

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """A request to the model is being answered, up to the last byte."""
        self._num_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    def refusal(self) -> ApiError | None:
        """Why a request to the model cannot be taken now; None where it can."""
        match self.phase:
            case Phase.LOADING:
                return ApiError(503, f"The model is loading{self._stage()}.", code="loading", retry_after_seconds=5)
            case Phase.DRAINING:
                return shutting_down()
            case Phase.DEAD:
                return ApiError(503, str(self._death), code="engine_died")
        return None

    def progress_body(self) -> dict[str, Any] | None:
        if self.progress is None:
            return None
        return {name: getattr(self.progress, name) for name in ("stage", "done", "total", "unit")}

    def _stage(self) -> str:
        if self.progress is None:
            return ""
        share = f", {100 * self.progress.done // self.progress.total}%" if self.progress.total else ""
        return f": {self.progress.stage}{share}"
