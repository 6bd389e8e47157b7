"""A slower link than the machine has, for comparisons."""

import threading
import time
from collections.abc import Callable

import torch

from engine.device import DONE, Event
from engine.experts.layout import ExpertId
from engine.experts.store import ExpertStore


class PacedStore:
    """Fetches from another store, one after the other at a given rate at most. Closes that store.

    It paces once `is_on` is set, and never where the rate is None. A fetch returns when its bytes would have come over
    a link of that rate, which takes transfers in the order in which they are asked for. Where the store itself is
    slower, it sets the pace.
    """

    def __init__(
        self,
        store: ExpertStore,
        bytes_per_second: float | None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = 0.0
        """When the link has moved all that it was asked for."""
        self.is_on = False

    def is_divisible(self, expert: ExpertId) -> bool:
        return self._store.is_divisible(expert)

    def fetch(self, expert: ExpertId, destination: torch.Tensor, offset: int = 0) -> Event:
        if not self.is_on or self._bytes_per_second is None:
            return self._store.fetch(expert, destination, offset)
        with self._lock:
            arrives_at = max(self._free_at, self._clock()) + destination.nbytes / self._bytes_per_second
            self._free_at = arrives_at
        self._store.fetch(expert, destination, offset).synchronize()
        self._sleep(max(0.0, arrives_at - self._clock()))
        return DONE

    def close(self) -> None:
        self._store.close()
