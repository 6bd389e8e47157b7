"""Ways to serve one model with one budget, decoded in virtual time."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from engine.choice import WARM_UP_TOKENS, Scenario, link_bandwidth, scenario
from engine.config import BenchConfig
from engine.description import ModelDescription
from engine.planning import Alternative, Machine, alternatives
from engine.profile import Profile
from engine.protocol import Tier
from engine.simulation import Simulated, Simulation
from engine.sizing import Choices

MODES: dict[str, Mapping[str, Any]] = {
    "lru": {"draft": "none", "cache_policy": "lru", "prefetch": False},
    "plain": {"draft": "none"},
    "specter": {"draft": "quantized"},
    "specter-4": {"draft": "quantized", "draft_length": 4},
    "specter-8": {"draft": "quantized", "draft_length": 8},
}
REFERENCE = "lru"
AUTO = ("plain", "specter")
"""What `--draft auto` chooses from: n-grams, of which nothing is simulated, are plain decoding here."""


class Situation(NamedTuple):
    """A model on a machine, with what is known of its texts."""

    config: BenchConfig
    """With the budgets; the modes change other settings."""
    model: ModelDescription
    """As described for an automatic drafter."""
    machine: Machine
    profile: Profile
    bandwidth: float
    """Of the link, bytes per second."""
    warm_up_tokens: int = WARM_UP_TOKENS


class Result(msgspec.Struct, frozen=True):
    """Of one mode; seconds and bytes are per output token."""

    mode: str
    num_slots: int
    num_experts: int
    tpot_seconds: float
    compute_seconds: float
    link_seconds: float
    """What moving the bytes takes by itself."""
    transfer_bytes: float
    hit_rate: float
    tokens_per_cycle: float
    draft_length: float

    @property
    def bound(self) -> str:
        """What would have to be faster."""
        return "link" if self.link_seconds > self.compute_seconds else "compute"


def run_modes(situation: Situation, modes: Sequence[str]) -> dict[str, Result | None]:
    """The results of the modes by name; None for those that do not fit."""
    return {mode: run_mode(situation, mode) for mode in modes}


def fastest(results: Mapping[str, Result | None]) -> Result | None:
    """What the automatic choice comes to, if its predictions are right; None where nothing fits."""
    candidates = [result for mode in AUTO if (result := results[mode]) is not None]
    return min(candidates, key=lambda result: result.tpot_seconds, default=None)


def run_mode(situation: Situation, mode: str) -> Result | None:
    """None where it does not fit."""
    alternative, chosen = _plan(situation, mode), scenario_of(situation, mode)
    if chosen is None:
        return None
    simulated = Simulation(*chosen).run(situation.profile.tokens, situation.warm_up_tokens)
    return _result(mode, situation, alternative, simulated)


def scenario_of(situation: Situation, mode: str) -> Scenario | None:
    """What the engine would do in this mode; None where it does not fit."""
    alternative, sizes = _plan(situation, mode), situation.model.sizes
    if not alternative.plan.fits:
        return None
    return scenario(
        _config(situation, mode),
        sizes,
        situation.model.skeleton.top_k,
        situation.profile,
        _bandwidths(situation),
        alternative,
    )


def _config(situation: Situation, mode: str) -> BenchConfig:
    return BenchConfig.model_validate({**dict(situation.config), **MODES[mode]})


def _plan(situation: Situation, mode: str) -> Alternative:
    config = _config(situation, mode)
    model = situation.model._replace(choices=_choices(config, situation.model.choices))
    (alternative,) = alternatives(config, model, situation.machine)
    return alternative


def _choices(config: BenchConfig, choices: Choices) -> Choices:
    if config.draft == "none":
        return choices.without_draft()
    return choices if config.draft_length == "auto" else choices._replace(draft_length=config.draft_length)


def _bandwidths(situation: Situation) -> dict[Tier, float]:
    return {"host": situation.bandwidth, "disk": situation.bandwidth}


def _result(mode: str, situation: Situation, alternative: Alternative, simulated: Simulated) -> Result:
    return Result(
        mode=mode,
        num_slots=alternative.plan.num_slots,
        num_experts=alternative.plan.num_experts,
        tpot_seconds=simulated.tpot_seconds,
        compute_seconds=simulated.tpot_seconds - simulated.wait_seconds,
        link_seconds=simulated.transfer_bytes / link_bandwidth(alternative.plan, _bandwidths(situation)),
        transfer_bytes=simulated.transfer_bytes,
        hit_rate=simulated.hit_rate,
        tokens_per_cycle=simulated.tokens_per_cycle,
        draft_length=simulated.draft_length,
    )
