"""Requests one after the other: what every core does with its queue."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from engine.errors import RequestError, SpecterError
from engine.protocol import Failed, Finished, FinishReason, Submit, ToServer
from engine.request import Request, fitting


class SerialCore(ABC):
    """Serves requests in the order in which they came, a step at a time. Not thread-safe."""

    def __init__(self, max_model_len: int, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._queue: deque[Request] = deque()
        self.send: Callable[[ToServer], None] = lambda message: None
        """Takes every message for the server; set by the owner before the first request."""

    @abstractmethod
    def advance(self, request: Request) -> None:
        """Do the next piece of work for the request, which runs, and send what comes of it. Raises `SpecterError`."""

    @abstractmethod
    def release(self, request: Request) -> None:
        """The request that ran is over: free what it held."""

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def submit(self, submit: Submit) -> None:
        """Queue a request, or answer it with `Failed` where it cannot be served."""
        try:
            checked = fitting(submit, self._max_model_len, self._vocab_size)
            self._queue.append(Request(checked, self._eos_token_ids))
        except RequestError as error:
            self._send_failure(submit.request_id, error)

    def abort(self, request_id: str) -> None:
        """End a request, running or queued; unknown ids are ignored."""
        for request in self._queue:
            if request.request_id == request_id:
                self._finish(request, "abort")
                return

    def abort_all(self) -> None:
        for request in list(self._queue):
            self._finish(request, "abort")

    def step(self) -> None:
        """Do the next piece of work for the first request in the queue, which must not be empty."""
        request = self._queue[0]
        try:
            self.advance(request)
        except SpecterError as error:
            self._remove(request)
            self._send_failure(request.request_id, error)
            return
        if request.finish_reason is not None:
            self._finish(request, request.finish_reason)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._remove(request)
        self.send(Finished(request.request_id, reason))

    def _remove(self, request: Request) -> None:
        if request is self._queue[0]:
            self.release(request)
        self._queue.remove(request)

    def _send_failure(self, request_id: str, error: SpecterError) -> None:
        self.send(Failed(request_id, type(error).__name__, str(error)))
