"""Moves experts into slots while the model computes: `TransferSchedule` with threads, a store and a device.

Two sides share this object, under one lock. The step loop's thread says what will be needed (`plan`) and then visits
the experts of one layer after another (`visit`). Transfer threads do what `transfer_next` does, again and again: move
what the schedule names next.

Who waits for whom:
- a transfer thread waits for the lock's condition while there is nothing to move or no slot to move it to;
- `visit` waits for the condition until an expert that it needs is enqueued, then makes compute wait for its bytes;
- an expert that `visit` waits for is pinned in the moment in which it becomes READY, so no other fetch can take it.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from engine.device import DONE, Device, Event
from engine.errors import TransferError
from engine.experts.cache import Slot
from engine.experts.layout import ExpertId
from engine.experts.schedule import Piece, TransferSchedule
from engine.experts.store import ExpertStore
from engine.protocol import CycleStats
from engine.trace import NO_TRACE, Tracer

logger = logging.getLogger(__name__)


class ExpertTransfers:
    """The cache's only mover. `plan`, `visit` and `forget_plan` belong to one thread, that of the step loop."""

    def __init__(
        self, schedule: TransferSchedule, store: ExpertStore, device: Device, tracer: Tracer = NO_TRACE
    ) -> None:
        self._schedule = schedule
        self._store = store
        self._device = device
        self._tracer = tracer
        self._changed = threading.Condition()
        self._breakdown: Exception | None = None
        """Why transfers have ended for good."""
        self._link = _LinkClock()
        self._wait_seconds = 0.0
        self._threads: list[threading.Thread] = []
        self._closing = False

    # The step loop's side.

    def plan(self, predicted: Sequence[ExpertId]) -> int:
        """Replace the plan: experts in the order in which they will be visited; the bytes that are yet to be moved."""
        with self._changed:
            num_missing = self._schedule.plan(predicted)
            self._changed.notify_all()
        return num_missing * self._schedule.cache.expert_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes of all transfers that have begun, since the start."""
        return self._schedule.moved_bytes

    def forget_plan(self) -> None:
        """Cancel the prefetches that have not started; nothing is kept for later any more."""
        self.plan(())

    def visit(
        self,
        layer: int,
        rows: Mapping[int, Sequence[int]],
        num_tokens: int,
        compute: Callable[[int, torch.Tensor], None],
        next_predicted: Sequence[ExpertId] | None = None,
    ) -> None:
        """Call `compute(expert, record)` once per expert of the layer: resident ones first, then as they arrive.

        `rows` says which of the pass's `num_tokens` tokens each expert is for. `record` is uint8 [expert_bytes]
        on the device and may be read by compute that is enqueued within the call, not later. The layer is then out of
        the plan, which `next_predicted` replaces where it is given, behind what is needed now.
        Raises `TransferError` where an expert cannot be fetched.
        """
        with self._changed:
            self._schedule.begin_visit(layer, rows, num_tokens)
            if next_predicted is not None:
                self._schedule.plan(next_predicted)
            self._changed.notify_all()
        try:
            while (slot := self._next_arrival()) is not None:
                self._use(slot, compute)
        finally:
            with self._changed:
                self._schedule.end_visit()
                self._changed.notify_all()

    def stats(self) -> CycleStats:
        """The counters that concern experts, since the start; subtract two for the time between."""
        with self._changed:
            schedule = self._schedule
            return CycleStats(
                transfer_wait_seconds=self._wait_seconds,
                num_expert_hits=schedule.num_hits,
                num_expert_misses=schedule.num_misses,
                num_evictions=schedule.cache.num_evictions,
                num_prefetches_used=schedule.num_prefetches_used,
                num_prefetches_wasted=schedule.num_prefetches_wasted,
                num_demand_fetches=schedule.num_demand_fetches,
                prefetch_bytes=schedule.prefetch_bytes,
                demand_bytes=schedule.demand_bytes,
                transfer_seconds=self._link.busy_seconds(time.perf_counter()),
            )

    def check_integrity(self) -> None:
        """Raise `AssertionError` where an invariant of the slots is broken."""
        with self._changed:
            self._schedule.cache.check_integrity()

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
        """Enqueue the most urgent piece for which there is a slot; its event, or None where there is none to do."""
        with self._changed:
            piece = self._begin()
        if piece is None:
            return None
        arrival = self._fetch(piece)
        with self._changed:
            self._link.end(time.perf_counter())
        return arrival

    def _run(self) -> None:
        while True:
            with self._changed:
                piece = None
                while not self._closing and (piece := self._begin()) is None:
                    self._changed.wait()
                if piece is None:
                    return
            started = time.perf_counter()
            try:
                # What is enqueued can no longer be overtaken by a demand fetch, so each thread enqueues one at a time.
                self._fetch(piece).synchronize()
            except Exception as error:  # the device is broken: nothing that it moves can be trusted any more
                with self._changed:
                    self._breakdown = error
                    self._changed.notify_all()
                return
            ended = time.perf_counter()
            self._trace(piece, started, ended)
            with self._changed:
                self._link.end(ended)

    def _begin(self) -> Piece | None:
        piece = self._schedule.begin_piece()
        if piece is not None:
            self._link.begin(time.perf_counter())
        return piece

    def _fetch(self, piece: Piece) -> Event:
        expert, slot = piece.transfer.expert, piece.transfer.slot
        try:
            self._device.copy_waits_for(slot.last_use)
            part = slot.record[piece.offset : piece.offset + piece.num_bytes]
            arrival = self._store.fetch(expert, part, piece.offset)
        except Exception as error:  # a transfer thread has no caller: whoever waits for the expert is told
            with self._changed:
                if not self._schedule.fail_piece(piece, error):
                    logger.warning("prefetch of %s failed (%s); it is fetched again when it is needed", expert, error)
                self._changed.notify_all()
            return DONE
        with self._changed:
            self._schedule.end_piece(piece, arrival)
            self._changed.notify_all()
        return arrival

    def _trace(self, piece: Piece, started: float, ended: float) -> None:
        layer, expert = piece.transfer.expert
        kind = "prefetch" if piece.transfer.is_prefetch else "demand"
        self._tracer.add("transfer", f"expert {layer}/{expert}", started, ended, kind=kind, bytes=piece.num_bytes)

    def _next_arrival(self) -> Slot | None:
        """The next pinned slot of the visit; None when all experts have been handed out."""
        with self._changed:
            started = time.perf_counter()
            try:
                while (slot := self._schedule.next_arrival()) is None and self._schedule.is_waiting:
                    if self._breakdown is not None:
                        raise self._breakdown
                    if self._closing:
                        raise InterruptedError("the engine is closing")
                    self._changed.wait()
            except Exception as error:
                raise TransferError(f"An expert could not be read: {str(error).rstrip('.')}.") from error
            ended = time.perf_counter()
            self._wait_seconds += ended - started
        if self._tracer.is_on and slot is not None and ended - started > MIN_TRACED_WAIT_SECONDS:
            self._tracer.add("wait", "wait", started, ended)
        return slot

    def _use(self, slot: Slot, compute: Callable[[int, torch.Tensor], None]) -> None:
        assert slot.owner is not None
        try:
            for arrival in slot.filled:
                self._device.compute_waits_for(arrival)
            compute(slot.owner.expert, slot.record)
        finally:
            with self._changed:
                self._schedule.end_use(slot, self._device.record_compute())
                self._changed.notify_all()


MIN_TRACED_WAIT_SECONDS = 50e-6
"""Shorter waits are the cost of asking."""


class _LinkClock:
    """For how long at least one transfer has been in flight. Mutable; guarded by the lock of `ExpertTransfers`."""

    def __init__(self) -> None:
        self._busy_seconds = 0.0
        self._num_in_flight = 0
        self._busy_since = 0.0

    def begin(self, now: float) -> None:
        if self._num_in_flight == 0:
            self._busy_since = now
        self._num_in_flight += 1

    def end(self, now: float) -> None:
        self._num_in_flight -= 1
        if self._num_in_flight == 0:
            self._busy_seconds += now - self._busy_since

    def busy_seconds(self, now: float) -> float:
        return self._busy_seconds + (now - self._busy_since if self._num_in_flight else 0.0)
