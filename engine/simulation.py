"""Decoding in virtual time: what a token would take on a machine, told from recorded routes without running a model.

The real schedule, cache, policy and governor run on a clock of their own, against a link that moves so many bytes per
second and passes that compute for so long. `--draft auto` chooses by it; `benchmarks.simulate` plans other machines.

What it takes for granted: the link moves one expert after the other; passes take the time that they were measured to
take, split evenly over layers and over the experts that a layer visits; drafted tokens behind the first rejected one
want the experts that the text's own tokens want.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.config import CachePolicyName
from engine.device import DONE
from engine.experts.bandwidth import piece_bytes
from engine.experts.cache import ExpertCache
from engine.experts.planner import LookaheadBuffer
from engine.experts.policy import ExpertIndex, eviction_policy
from engine.experts.schedule import Piece, TransferSchedule
from engine.experts.store import NUM_TRANSFERS
from engine.profile import ProfiledToken
from engine.speculative.cycle import Cycle
from engine.speculative.governor import DraftControl, DraftState
from engine.speculative.lookahead import RouterLookahead


class Hardware(NamedTuple):
    """What a machine takes for one model."""

    bandwidth: float
    """Of the link, bytes per second."""
    pass_seconds: float
    """Of a full-precision pass without its experts; the same for any number of tokens."""
    expert_seconds: float
    """Of one expert of one layer, for however many tokens."""
    draft_seconds: float
    """Of one drafted token."""


class Shape(NamedTuple):
    experts_per_layer: Sequence[int]
    expert_bytes: int


class Decoding(NamedTuple):
    """How to decode."""

    num_slots: int
    policy: CachePolicyName
    control: DraftControl | None
    """Of the quantized draft; None: without one."""
    has_guesses: bool
    """Whether passes that no draft has planned for go by the guesses of the next routers."""


class Simulated(NamedTuple):
    """Per output token, after those at the beginning that fill the cache."""

    tpot_seconds: float
    wait_seconds: float
    transfer_bytes: float
    hit_rate: float
    link_load: float
    tokens_per_cycle: float
    draft_length: float


class Simulation:
    """One decoding on one machine. Mutable: time goes on."""

    def __init__(self, shape: Shape, hardware: Hardware, decoding: Decoding) -> None:
        index = ExpertIndex(shape.experts_per_layer)
        slab = torch.empty(decoding.num_slots, shape.expert_bytes, dtype=torch.uint8, device="meta")
        policy = eviction_policy(decoding.policy, index, decoding.num_slots)
        self._shape = shape
        self._hardware = hardware
        self._decoding = decoding
        at_once = min(shape.expert_bytes, piece_bytes(hardware.bandwidth))
        self._schedule = TransferSchedule(ExpertCache(slab, index), policy, index, lambda expert: at_once)
        self._now = 0.0
        self._in_flight: deque[tuple[float, Piece]] = deque()
        """What the link moves, with the times at which that ends, in order."""
        self._link_free_at = 0.0
        self._busy_seconds = 0.0
        self._wait_seconds = 0.0
        self._lookahead: RouterLookahead | None = None

    def run(self, text: Sequence[ProfiledToken], warm_up_tokens: int) -> Simulated:
        """Decode the text, and measure from `warm_up_tokens` on."""
        if self._decoding.has_guesses:
            self._lookahead = RouterLookahead(_RecordedRouters(text, len(self._shape.experts_per_layer)))
        position = num_cycles = num_drafted = 0
        start: tuple[float, ...] | None = None
        first = 0
        while position < len(text):
            if start is None and position >= warm_up_tokens:
                start, first = self._counters(), position
                num_cycles = num_drafted = 0
            drafted, taken = self._cycle(text, position)
            position += taken
            num_cycles += 1
            num_drafted += drafted
        assert start is not None, "the text ends with the warm-up"
        num_tokens = position - first
        seconds, waited, num_bytes, hits, misses, busy = (
            end - begin for begin, end in zip(start, self._counters(), strict=True)
        )
        return Simulated(
            tpot_seconds=seconds / num_tokens,
            wait_seconds=waited / num_tokens,
            transfer_bytes=num_bytes / num_tokens,
            hit_rate=hits / (hits + misses),
            link_load=busy / seconds,
            tokens_per_cycle=num_tokens / num_cycles,
            draft_length=num_drafted / num_cycles,
        )

    def _counters(self) -> tuple[float, ...]:
        schedule = self._schedule
        return (
            self._now,
            self._wait_seconds,
            schedule.moved_bytes,
            schedule.num_hits,
            schedule.num_misses,
            self._busy_seconds,
        )

    def _cycle(self, text: Sequence[ProfiledToken], position: int) -> tuple[int, int]:
        """From the token at `position`, which is decided already; how many tokens were drafted, and decided."""
        started, before = self._now, self._counters()
        confidences = self._draft(text, position)
        drafted_at = self._now
        self._verify(text, range(position, position + 1 + len(confidences)), is_planned=bool(confidences))
        num_accepted = 0
        while num_accepted < len(confidences) and text[position + 1 + num_accepted].is_drafted:
            num_accepted += 1
        _, waited, num_bytes, _, _, busy = (end - begin for begin, end in zip(before, self._counters(), strict=True))
        cycle = Cycle(
            confidences=confidences,
            num_accepted=num_accepted,
            draft_seconds=drafted_at - started,
            verify_seconds=self._now - drafted_at - waited,
            seconds=self._now - started,
            transfer_bytes=num_bytes,
            transfer_seconds=busy,
        )
        if self._decoding.control is not None:
            self._decoding.control.cycle_ended(cycle)
        return len(confidences), 1 + num_accepted

    def _draft(self, text: Sequence[ProfiledToken], position: int) -> list[float]:
        """The confidences of the drafted tokens."""
        control = self._decoding.control
        confidences: list[float] = []
        if control is None:
            return confidences
        lookahead = LookaheadBuffer()
        moved_before = self._schedule.moved_bytes
        planned_bytes: float | None = None
        is_wanted = True
        num_passes = 0
        while is_wanted:
            room = position + 1 + len(confidences) < len(text)
            is_wanted = room and control.wants_token(DraftState(confidences, num_passes, planned_bytes))
            if not confidences and not is_wanted:
                break
            self._draft_pass()
            lookahead.add([torch.tensor([experts]) for experts in text[position + num_passes].draft_routes])
            num_passes += 1
            missing = self._schedule.plan(lookahead.predicted())
            planned_bytes = self._schedule.moved_bytes - moved_before + missing * self._shape.expert_bytes
            if is_wanted:
                confidences.append(text[position + 1 + len(confidences)].confidence)
        return confidences

    def _draft_pass(self) -> None:
        self._compute(self._hardware.draft_seconds)

    def _verify(self, text: Sequence[ProfiledToken], window: range, is_planned: bool) -> None:
        """One full-precision pass over the tokens at these positions."""
        num_layers = len(self._shape.experts_per_layer)
        positions = torch.tensor(window).unsqueeze(-1)
        for layer in range(num_layers):
            self._compute(self._hardware.pass_seconds / num_layers)
            routes = [text[position].routes[layer] for position in window]
            rows: dict[int, list[int]] = {}
            for row, experts in enumerate(routes):
                for expert in experts:
                    rows.setdefault(expert, []).append(row)
            self._schedule.begin_visit(layer, rows, len(window))
            if self._lookahead is not None and not is_planned:
                guessed = self._lookahead.predict(layer, positions)
                if guessed is not None:
                    self._schedule.plan(guessed)
            while (slot := self._schedule.next_arrival()) is not None or self._schedule.is_waiting:
                if slot is None:
                    self._wait()
                else:
                    self._compute(self._hardware.expert_seconds)
                    self._schedule.end_use(slot, DONE)
            self._schedule.end_visit()

    def _compute(self, seconds: float) -> None:
        """Time goes on, and transfers with it."""
        until = self._now + seconds
        self._begin_pieces()
        while self._in_flight and self._in_flight[0][0] <= until:
            self._end_piece()
        self._now = until

    def _wait(self) -> None:
        """Until the next piece has come."""
        started = self._now
        self._begin_pieces()
        assert self._in_flight, "a visit waits for what nobody moves"
        self._end_piece()
        self._wait_seconds += self._now - started

    def _begin_pieces(self) -> None:
        while len(self._in_flight) < NUM_TRANSFERS and (piece := self._schedule.begin_piece()) is not None:
            seconds = piece.num_bytes / self._hardware.bandwidth
            self._link_free_at = max(self._link_free_at, self._now) + seconds
            self._busy_seconds += seconds
            self._in_flight.append((self._link_free_at, piece))

    def _end_piece(self) -> None:
        self._now, piece = self._in_flight.popleft()
        self._schedule.end_piece(piece, DONE)
        self._begin_pieces()


class _RecordedRouters:
    """Answers with what the routers guessed when the text was profiled; the "hidden states" are positions [T, 1]."""

    def __init__(self, text: Sequence[ProfiledToken], num_layers: int) -> None:
        self._text = text
        self.num_layers = num_layers

    def choices(self, layer: int, ahead: int, hidden_states: torch.Tensor) -> torch.Tensor:
        positions = hidden_states.flatten().tolist()
        return torch.tensor([self._text[position].guesses[layer][ahead - 1] for position in positions])
