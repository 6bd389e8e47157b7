"""The first passes, by a clock of the test's own."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from engine.device import CpuDevice
from engine.experts.transfer import ExpertTransfers
from engine.model.causal_lm import CausalLM
from engine.model.dispatch import ExpertsImplementation
from engine.profile import PassTimes
from engine.protocol import CycleStats
from engine.speculative.quantized import QuantizedExperts
from engine.warm_up import NUM_TOKENS, measure_passes
from tests.engine.harness import load, running_core

VOCAB_SIZE = 12
FIRST_SECONDS = 100.0
"""What the first pass of each kind takes more."""
WAIT_SECONDS = 7.0
"""Per full-precision pass."""
OTHERS_SECONDS = 3.0
"""By which every second pass is longer, because of something else that the machine does."""


class FakeTransfers:
    def __init__(self) -> None:
        self.waited = 50.0  # since the start
        self.num_visits = 1000

    def stats(self) -> CycleStats:
        return CycleStats(transfer_wait_seconds=self.waited, num_expert_hits=self.num_visits, num_expert_misses=9)


class FakeModel:
    """A pass takes one second and a tenth per token, and a drafted one a quarter."""

    def __init__(self, transfers: FakeTransfers, advance: Callable[[float], None]) -> None:
        self.transfers = transfers
        self.advance = advance
        self.passes: list[tuple[object, int]] = []
        self.room = 0

    def new_cache(self, max_tokens: int) -> None:
        self.room = max_tokens

    def forward(self, token_ids: list[int], cache: None, experts: object) -> torch.Tensor:
        assert all(0 <= token_id < VOCAB_SIZE for token_id in token_ids)
        self.room -= len(token_ids)
        assert self.room >= 0
        is_first = experts not in [before for before, _ in self.passes]
        self.passes.append((experts, len(token_ids)))
        self.advance(FIRST_SECONDS * is_first + OTHERS_SECONDS * (len(self.passes) % 2))
        if isinstance(experts, QuantizedExperts):
            experts._routes.append(torch.zeros(1, 2, dtype=torch.int64))
            self.advance(0.25)
        else:
            self.advance(1.0 + 0.1 * len(token_ids) + WAIT_SECONDS)
            self.transfers.waited += WAIT_SECONDS
            self.transfers.num_visits += 4 * len(token_ids)
        return torch.zeros(1, VOCAB_SIZE)


@pytest.mark.parametrize("quantized", [QuantizedExperts([], CpuDevice()), None])
def test_passes_are_timed_without_the_first_one_and_without_waiting(
    monkeypatch: pytest.MonkeyPatch, quantized: QuantizedExperts | None
) -> None:
    now = 0.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("time.perf_counter", lambda: now)
    transfers = FakeTransfers()
    model = FakeModel(transfers, advance)
    experts = cast(ExpertsImplementation, object())
    times = measure_passes(
        cast(CausalLM, model), experts, cast(ExpertTransfers, transfers), quantized, vocab_size=VOCAB_SIZE
    )
    assert times.verify_seconds == pytest.approx((1.1, 1.0 + 0.1 * NUM_TOKENS))
    assert times.verify_experts == (4, 4 * NUM_TOKENS)
    assert times.draft_seconds == pytest.approx(0.25 if quantized else 0.0)
    if quantized is not None:
        assert quantized._routes == []  # none are left for the first request's draft


@pytest.mark.parametrize("num_slots", [1, 18])
def test_a_real_model_is_as_before(mixtral: Path, model_cache: Path, num_slots: int) -> None:
    loaded, config = load(mixtral, model_cache)
    with running_core(loaded, config, num_slots) as running:
        expected = running.generate([5, 6, 7], 8, ignore_eos=True).token_ids
        experts = running.core._experts.planned
        times = measure_passes(loaded.model, experts, running.transfers, loaded.draft, vocab_size=96)
        assert isinstance(times, PassTimes)
        one, most = times.verify_experts
        assert one == 3 * 2  # layers, experts per token
        assert one < most <= 3 * 6
        assert min(*times.verify_seconds, times.draft_seconds) > 0
        assert running.generate([5, 6, 7], 8, ignore_eos=True).token_ids == expected
