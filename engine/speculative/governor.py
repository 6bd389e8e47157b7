"""How many tokens to draft: as many as the time per token gains from, by running estimates.

A cycle that drafts k tokens is expected to yield A(k) = 1 + sum_i prod_{j<=i} p_j tokens and to take

    T(k) = max(X(k) / bandwidth, draft(k) + verify(k + 1)) + slack

with X(k) the bytes that it moves and p_j the probability that the j-th drafted token is accepted, told by the draft's
own confidence in it. The draft goes on while a longer one is expected to have the better A / T: the paper's
Amortization Roofline, with what is known of the tokens drafted so far instead of an average.

Pure: the governor is told what was measured, and reads no clock.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from engine.protocol import Estimates
from engine.speculative.cycle import Cycle
from engine.speculative.fading import PRIOR_WEIGHT, FadingLine, FadingRate, FadingRatio

NUM_CONFIDENCE_BINS = 10
PROBE_CYCLES = 12
"""After so many cycles without a draft one is tried, for what has changed since."""
PROBE_TOKENS = 2
MIN_TRANSFER_SECONDS = 1e-9


class DraftState(NamedTuple):
    """A draft on its way."""

    confidences: Sequence[float]
    """Of each drafted token: the probability that the drafter gave it."""
    num_planned: int = 0
    """Rows of the verification pass of which the routes are known: a drafted token's come with the next one."""
    transfer_bytes: float | None = None
    """What those rows move, with what has moved since the draft began; None where nothing is planned."""


class DraftControl(Protocol):
    """Decides the length of drafts. Mutable: it learns from cycles."""

    max_length: int

    def wants_token(self, draft: DraftState) -> bool:
        """Whether one more token should be drafted; asked before each, with none drafted at first."""

    def cycle_ended(self, cycle: Cycle) -> None:
        """Learn from a cycle."""

    @property
    def estimates(self) -> Estimates | None:
        """What the last decision was made by; None where nothing is estimated."""


class FixedLength:
    """Always the same length."""

    estimates = None

    def __init__(self, length: int) -> None:
        self.max_length = length

    def wants_token(self, draft: DraftState) -> bool:
        return len(draft.confidences) < self.max_length

    def cycle_ended(self, cycle: Cycle) -> None:
        pass


class Expectation(NamedTuple):
    """What is believed before anything has been measured."""

    acceptance_rate: float
    """Of drafted tokens, over all confidences."""
    acceptance_by_confidence: Sequence[float]
    """Of those with confidences from 0 to 1, in `NUM_CONFIDENCE_BINS` equal steps."""
    draft_seconds: float
    """Per drafted token."""
    pass_experts: Sequence[float]
    """Experts that passes over 1, 2, ... tokens visit, one more for the longest draft's."""
    verify_seconds: Sequence[float]
    """Of passes over one token and over that many."""
    transfer_bytes: Sequence[float]
    """Of the same passes."""
    bandwidth: float


class Governor:
    """The draft length that is expected to be fastest, token by token."""

    def __init__(self, max_length: int, max_cycle_seconds: float, expectation: Expectation) -> None:
        self.max_length = max_length
        self._max_cycle_seconds = max_cycle_seconds
        self._acceptance = [FadingRate(rate) for rate in expectation.acceptance_by_confidence]
        self._next_acceptance = FadingRate(expectation.acceptance_rate)
        # The time of so many cycles' transfers; where all is resident, any transfer says more than the expectation.
        expected_seconds = PRIOR_WEIGHT * expectation.transfer_bytes[0] / expectation.bandwidth
        self._bandwidth = FadingRatio(expectation.bandwidth, max(expected_seconds, MIN_TRANSFER_SECONDS))
        self._draft = FadingRatio(expectation.draft_seconds)
        self._verify = FadingLine(expectation.pass_experts, expectation.verify_seconds)
        self._transfer = FadingLine(expectation.pass_experts, expectation.transfer_bytes)
        self._slack = FadingRatio(0.0)
        candidates = list(self._expect(DraftState(()), max_length))
        best = max(candidates, key=lambda expected: expected.num_tokens / expected.cycle_seconds)
        self._throughput = FadingRatio(best.num_tokens / best.cycle_seconds, PRIOR_WEIGHT * best.cycle_seconds)
        self._num_idle_cycles = 0
        self.estimates: Estimates | None = None

    def wants_token(self, draft: DraftState) -> bool:
        length = len(draft.confidences)
        if length >= self.max_length:
            return False
        candidates = list(self._expect(draft, self.max_length))
        if self._num_idle_cycles >= PROBE_CYCLES and length < PROBE_TOKENS:
            return candidates[1].cycle_seconds <= self._max_cycle_seconds
        best = max(range(len(candidates)), key=lambda ahead: self._gain(candidates[ahead]))
        self.estimates = candidates[best]
        return best > 0

    def cycle_ended(self, cycle: Cycle) -> None:
        length = len(cycle.confidences)
        (expected,) = self._expect(DraftState(cycle.confidences, length + 1, cycle.transfer_bytes), length)
        judged = cycle.confidences[: cycle.num_accepted + 1]  # behind the first rejection, nothing is known
        for position, confidence in enumerate(judged):
            self._acceptance[confidence_bin(confidence)].happened(position < cycle.num_accepted)
            self._next_acceptance.happened(position < cycle.num_accepted)
        self._num_idle_cycles = 0 if length else self._num_idle_cycles + 1
        if length:
            self._draft.add(cycle.draft_seconds, length)
        self._throughput.add(cycle.num_accepted + 1, cycle.seconds)
        self._verify.add(length + 1, cycle.verify_seconds)
        self._transfer.add(length + 1, cycle.transfer_bytes)
        if cycle.transfer_seconds:
            self._bandwidth.add(cycle.transfer_bytes, cycle.transfer_seconds)
        self._slack.add(max(0.0, cycle.seconds - (expected.cycle_seconds - self._slack.value)), 1.0)

    def _gain(self, expected: Estimates) -> float:
        """Tokens that the cycle yields beyond what its time yields on average."""
        if expected.cycle_seconds > self._max_cycle_seconds and expected.num_tokens > 1.0:
            return -math.inf
        return expected.num_tokens - self._throughput.value * expected.cycle_seconds

    def _expect(self, draft: DraftState, max_length: int) -> Iterator[Estimates]:
        """Of the draft as it is, and of each longer one up to `max_length`."""
        num_drafted = len(draft.confidences)
        probability = num_tokens = 1.0
        for confidence in draft.confidences:
            probability *= self._acceptance[confidence_bin(confidence)].value
            num_tokens += probability
        planned_bytes = draft.transfer_bytes
        for length in range(num_drafted, max_length + 1):
            if length > num_drafted:
                probability *= self._next_acceptance.value
                num_tokens += probability
            transfer_bytes = self._transfer.at(length + 1)
            if planned_bytes is not None:
                transfer_bytes = planned_bytes + max(0.0, transfer_bytes - self._transfer.at(draft.num_planned))
            verify_seconds = self._verify.at(length + 1)
            compute_seconds = length * self._draft.value + verify_seconds
            yield Estimates(
                acceptance_rate=self._next_acceptance.value,
                draft_seconds=self._draft.value,
                verify_seconds=verify_seconds,
                transfer_bytes=transfer_bytes,
                bandwidth=self._bandwidth.value,
                num_tokens=num_tokens,
                cycle_seconds=max(transfer_bytes / self._bandwidth.value, compute_seconds) + self._slack.value,
            )


def confidence_bin(confidence: float) -> int:
    """Which of `NUM_CONFIDENCE_BINS` it is in."""
    return min(NUM_CONFIDENCE_BINS - 1, int(confidence * NUM_CONFIDENCE_BINS))
