"""Who may use the engine: one request runs, the rest wait in a bounded queue, first come, first served."""

import asyncio
from collections import deque


class QueueFullError(Exception):
    """As many requests wait as may."""


class Admission:
    """The queue; its head runs. Mutable; belongs to one event loop."""

    def __init__(self, queue_length: int) -> None:
        self._queue_length = queue_length
        self._tickets: deque[Ticket] = deque()

    @property
    def num_running(self) -> int:
        return min(len(self._tickets), 1)

    @property
    def num_waiting(self) -> int:
        return len(self._tickets) - self.num_running

    def enter(self) -> "Ticket":
        """Take a place at the end; raises QueueFullError. The ticket must be left in the end, whatever happens."""
        if len(self._tickets) > self._queue_length:
            raise QueueFullError
        ticket = Ticket(self)
        self._tickets.append(ticket)
        self._call_head()
        return ticket

    def leave(self, ticket: "Ticket") -> None:
        if ticket in self._tickets:
            self._tickets.remove(ticket)
            self._call_head()

    def _call_head(self) -> None:
        if self._tickets:
            self._tickets[0].called.set()


class Ticket:
    """A place in the queue."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.called = asyncio.Event()

    async def turn(self) -> None:
        """Wait until the engine is this request's."""
        await self.called.wait()

    def leave(self) -> None:
        """Give the place up, waiting or running; idempotent."""
        self._admission.leave(self)
