"""Moves experts into slots while the model computes.

Two sides share this object, under one lock. The step loop's thread says what will be needed (`plan`) and then visits
the experts of one layer after another (`visit`). Transfer threads do what `transfer_next` does: what `visit` waits for
comes first (demand fetches), then the plan in its order, each as soon as a slot can be had. More planned experts than
slots is normal: a slot is free again when its layer has been visited, so the plan streams through.

Who waits for whom:
- a transfer thread waits for the lock's condition while there is nothing to move or no slot to move it to;
- `visit` waits for the condition until an expert that it needs is enqueued, then makes compute wait for its bytes;
- an expert that `visit` waits for is pinned in the moment in which it becomes READY, so no other fetch can take it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from engine.device import DONE, Device, Event
from engine.errors import TransferError
from engine.experts.cache import ExpertCache, Slot
from engine.experts.layout import ExpertId
from engine.experts.store import ExpertStore
from engine.protocol import CycleStats

logger = logging.getLogger(__name__)


class ExpertTransfers:
    """The cache's only mover. `plan`, `visit` and `forget_plan` belong to one thread, that of the step loop."""

    def __init__(self, cache: ExpertCache, store: ExpertStore, device: Device) -> None:
        self._cache = cache
        self._store = store
        self._device = device
        self._changed = threading.Condition()
        self._planned: dict[ExpertId, int] = {}
        self._prefetches: deque[ExpertId] = deque()
        self._demands: deque[ExpertId] = deque()
        self._awaited: set[ExpertId] = set()
        self._arrived: deque[Slot] = deque()
        self._failure: Exception | None = None
        """Why an expert that the current visit waits for did not come."""
        self._breakdown: Exception | None = None
        """Why transfers have ended for good."""
        self._counters = _Counters()
        self._threads: list[threading.Thread] = []
        self._closing = False

    # The step loop's side.

    def plan(self, predicted: Sequence[ExpertId]) -> None:
        """Replace the plan: experts in the order in which they will be visited; what is not cached is prefetched."""
        with self._changed:
            self._planned = {expert: rank for rank, expert in enumerate(predicted)}
            self._prefetches = deque(expert for expert in self._planned if expert not in self._cache)
            self._changed.notify_all()

    def forget_plan(self) -> None:
        """Cancel the prefetches that have not started; nothing is kept for later any more."""
        self.plan(())

    def visit(self, layer: int, experts: Iterable[int], compute: Callable[[int, torch.Tensor], None]) -> None:
        """Call `compute(expert, record)` once per expert of the layer: resident ones first, then as they arrive.

        `record` is uint8 [expert_bytes] on the device and may be read by compute that is enqueued within the call, not
        later. Afterwards the layer is out of the plan. Raises `TransferError` where an expert cannot be fetched.
        """
        self._begin_visit([ExpertId(layer, expert) for expert in experts])
        try:
            while (slot := self._next_arrival()) is not None:
                self._use(slot, compute)
        finally:
            self._end_visit(layer)

    def stats(self) -> CycleStats:
        """The counters that concern experts, since the start; subtract two for the time between."""
        with self._changed:
            return self._counters.snapshot(self._cache)

    def check_integrity(self) -> None:
        """Raise `AssertionError` where an invariant of the slots is broken."""
        with self._changed:
            self._cache.check_integrity()

    # The transfer side.

    def start(self, num_threads: int) -> None:
        """Begin to transfer in the background, with one transfer per thread in flight."""
        for index in range(num_threads):
            thread = threading.Thread(target=self._run, name=f"transfer-{index}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """End the threads after the transfers in flight; a visit that waits fails. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def transfer_next(self) -> Event | None:
        """Enqueue the most urgent transfer for which there is a slot; its event, or None where there is none to do."""
        with self._changed:
            slot = self._reserve_next()
        if slot is None:
            return None
        filled = self._fetch(slot)
        with self._changed:
            self._counters.end_transfer()
        return filled

    def _run(self) -> None:
        while True:
            with self._changed:
                slot = None
                while not self._closing and (slot := self._reserve_next()) is None:
                    self._changed.wait()
                if slot is None:
                    return
            try:
                # What is enqueued can no longer be overtaken by a demand fetch, so each thread enqueues one at a time.
                self._fetch(slot).synchronize()
            except Exception as error:  # the device is broken: nothing that it moves can be trusted any more
                with self._changed:
                    self._breakdown = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._counters.end_transfer()

    def _reserve_next(self) -> Slot | None:
        for queue, is_urgent in ((self._demands, True), (self._prefetches, False)):
            while queue and queue[0] in self._cache:
                queue.popleft()
            if not queue:
                continue
            is_prefetch = queue[0] in self._planned
            slot = self._cache.reserve(queue[0], is_prefetch, self._planned, is_urgent)
            if slot is not None:
                queue.popleft()
                self._counters.begin_transfer(is_prefetch, slot.record.nbytes)
            return slot
        return None

    def _fetch(self, slot: Slot) -> Event:
        assert slot.owner is not None
        try:
            self._device.copy_waits_for(slot.last_use)
            filled = self._store.fetch(slot.owner, slot.record)
        except Exception as error:  # a transfer thread has no caller: whoever waits for the expert is told
            return self._fail(slot, error)
        with self._changed:
            self._cache.fill(slot, filled)
            if slot.owner in self._awaited:
                self._awaited.remove(slot.owner)
                self._arrived.append(self._cache.pin(slot.owner))
            self._changed.notify_all()
        return filled

    def _fail(self, slot: Slot, error: Exception) -> Event:
        with self._changed:
            if slot.owner in self._awaited:
                self._failure = error
            else:
                logger.warning("prefetch of %s failed (%s); it is fetched again when it is needed", slot.owner, error)
            self._cache.abandon(slot)
            self._changed.notify_all()
        return DONE

    def _begin_visit(self, experts: Sequence[ExpertId]) -> None:
        with self._changed:
            self._failure = None
            for expert in experts:
                if self._cache.is_ready(expert):
                    self._arrived.append(self._cache.pin(expert))
                    continue
                self._awaited.add(expert)
                if expert not in self._cache:  # else a prefetch of it is under way, which the visit joins
                    self._demands.append(expert)
            self._counters.num_hits += len(self._arrived)
            self._counters.num_misses += len(self._awaited)
            self._changed.notify_all()

    def _next_arrival(self) -> Slot | None:
        """The next pinned slot of the visit; None when all experts have been handed out."""
        with self._changed:
            started = time.perf_counter()
            while not self._arrived and self._awaited:
                error = self._breakdown or self._failure
                if error is not None or self._closing:
                    reason = str(error or "the engine is closing").rstrip(".")
                    raise TransferError(f"An expert could not be read: {reason}.") from error
                self._changed.wait()
            self._counters.wait_seconds += time.perf_counter() - started
            return self._arrived.popleft() if self._arrived else None

    def _use(self, slot: Slot, compute: Callable[[int, torch.Tensor], None]) -> None:
        assert slot.owner is not None
        try:
            self._device.compute_waits_for(slot.filled)
            compute(slot.owner.expert, slot.record)
        finally:
            with self._changed:
                self._counters.num_prefetches_used += slot.is_unused_prefetch
                self._cache.unpin(slot, self._device.record_compute())
                self._changed.notify_all()

    def _end_visit(self, layer: int) -> None:
        with self._changed:
            for slot in self._arrived:
                self._cache.unpin(slot, None)
            self._arrived.clear()
            self._awaited.clear()
            self._demands.clear()
            self._planned = {expert: rank for expert, rank in self._planned.items() if expert.layer != layer}
            self._prefetches = deque(expert for expert in self._prefetches if expert.layer != layer)
            self._changed.notify_all()


class _Counters:
    """Mutable; guarded by the lock of `ExpertTransfers`."""

    def __init__(self) -> None:
        self.num_hits = 0
        self.num_misses = 0
        self.num_prefetches_used = 0
        self.wait_seconds = 0.0
        self._num_demand_fetches = 0
        self._prefetch_bytes = 0
        self._demand_bytes = 0
        self._busy_seconds = 0.0
        self._num_in_flight = 0
        self._busy_since = 0.0

    def begin_transfer(self, is_prefetch: bool, num_bytes: int) -> None:
        if is_prefetch:
            self._prefetch_bytes += num_bytes
        else:
            self._num_demand_fetches += 1
            self._demand_bytes += num_bytes
        if self._num_in_flight == 0:
            self._busy_since = time.perf_counter()
        self._num_in_flight += 1

    def end_transfer(self) -> None:
        self._num_in_flight -= 1
        if self._num_in_flight == 0:
            self._busy_seconds += time.perf_counter() - self._busy_since

    def snapshot(self, cache: ExpertCache) -> CycleStats:
        in_flight = time.perf_counter() - self._busy_since if self._num_in_flight else 0.0
        return CycleStats(
            transfer_wait_seconds=self.wait_seconds,
            num_expert_hits=self.num_hits,
            num_expert_misses=self.num_misses,
            num_evictions=cache.num_evictions,
            num_prefetches_used=self.num_prefetches_used,
            num_prefetches_wasted=cache.num_prefetches_wasted,
            num_demand_fetches=self._num_demand_fetches,
            prefetch_bytes=self._prefetch_bytes,
            demand_bytes=self._demand_bytes,
            transfer_seconds=self._busy_seconds + in_flight,
        )
