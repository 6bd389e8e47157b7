"""What drafts fastest on this machine, and what the governor begins with: predictions from a model's profile."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import msgspec

from engine.config import MAX_DRAFT_LENGTH, BenchConfig
from engine.forecast import ACCEPTANCE_RATE, NGRAM_ACCEPTANCE_RATE, distinct_experts
from engine.kernels.quantization import QuantizationSpec
from engine.planning import Alternative
from engine.profile import PassTimes, Profile, ProfiledToken
from engine.protocol import ModelPlan, Tier
from engine.simulation import Decoding, Hardware, Shape, Simulation
from engine.sizing import Choices, ModelSizes
from engine.speculative.governor import (
    NUM_CONFIDENCE_BINS,
    DraftControl,
    Expectation,
    FixedLength,
    Governor,
    confidence_bin,
)

WARM_UP_TOKENS = 20
"""Tokens of a profile that fill the cache before the prediction counts."""
ERRORS_PER_FINER_ERROR = 6
PRIOR_WEIGHT = 5.0
"""Drafted tokens of a profile that the expectation without one weighs as much as."""


class Scenario(NamedTuple):
    """What a `Simulation` is made of; for one run, as it holds the draft's control."""

    shape: Shape
    hardware: Hardware
    decoding: Decoding


def predicted_seconds(
    config: BenchConfig,
    sizes: ModelSizes,
    top_k: int,
    profile: Profile,
    bandwidths: Mapping[Tier, float],
    profiled_draft: QuantizationSpec | None = None,
) -> Callable[[Alternative], float]:
    """How long an output token is going to take, by the way in which memory is divided.

    `profiled_draft` is the draft that the profile was made with, where others are to be predicted too.
    """

    def predict(alternative: Alternative) -> float:
        drafting = profile_with(profile, profiled_draft, alternative.choices.draft, sizes)
        chosen = scenario(config, sizes, top_k, drafting, bandwidths, alternative)
        return Simulation(*chosen).run(drafting.tokens, WARM_UP_TOKENS).tpot_seconds

    return predict


def profile_with(
    profile: Profile, profiled: QuantizationSpec | None, draft: QuantizationSpec | None, sizes: ModelSizes
) -> Profile:
    """The profile, made with one draft, as it would probably be with a finer one.

    That is believed to make a sixth of the errors, as on the demo model (agreement of 0.980 with 8 bits and 0.882 with
    4), and to take as much longer as it is larger.
    """
    if draft is None or profiled is None or draft.bits <= profiled.bits:
        return profile
    errors, route_errors = count(), count()
    tokens = []
    for token in profile.tokens:
        stays_wrong = not token.is_drafted and next(errors) % ERRORS_PER_FINER_ERROR == 0
        stays_off = token.draft_routes != token.routes and next(route_errors) % ERRORS_PER_FINER_ERROR == 0
        draft_routes = token.draft_routes if stays_off else token.routes
        tokens.append(msgspec.structs.replace(token, is_drafted=not stays_wrong, draft_routes=draft_routes))
    draft_seconds = profile.times.draft_seconds * sizes.draft_bytes(draft) / sizes.draft_bytes(profiled)
    return Profile(tokens, msgspec.structs.replace(profile.times, draft_seconds=draft_seconds))


def scenario(
    config: BenchConfig,
    sizes: ModelSizes,
    top_k: int,
    profile: Profile,
    bandwidths: Mapping[Tier, float],
    alternative: Alternative,
) -> Scenario:
    """Decoding with memory divided in this way, as the profile's machine would do it."""
    plan, choices = alternative
    bandwidth = link_bandwidth(plan, bandwidths)
    expected = draft_expectation(plan, choices, sizes, top_k, profile.times, profile.tokens, bandwidth)
    return Scenario(
        Shape([layer.num_experts for layer in sizes.layout.layers], sizes.expert_bytes),
        hardware(profile.times, bandwidth),
        Decoding(
            num_slots=plan.num_slots,
            policy=config.cache_policy,
            control=draft_control(config, choices, expected) if choices.draft else None,
            has_guesses=config.prefetch and bool(profile.tokens[0].guesses),
        ),
    )


def draft_control(config: BenchConfig, choices: Choices, expected: Expectation) -> DraftControl:
    """Who decides how many tokens are drafted; `expected` is what an automatic length begins with."""
    if config.draft_length == "auto" and choices.draft_length:
        return Governor(choices.draft_length, config.max_cycle_seconds, expected)
    return FixedLength(choices.draft_length)


def link_bandwidth(plan: ModelPlan, bandwidths: Mapping[Tier, float]) -> float:
    """Bytes per second of experts out of all tiers together, if all are as popular; endless where nothing is moved."""
    shares: dict[Tier, int] = {"host": plan.num_host_experts, "disk": plan.num_disk_experts}
    seconds = sum(num_experts / bandwidths[tier] for tier, num_experts in shares.items() if tier in bandwidths)
    return plan.num_experts / seconds if seconds else 1e15


def hardware(times: PassTimes, bandwidth: float) -> Hardware:
    """A pass takes so long by itself, and so much more per expert that it visits."""
    one, most = times.verify_seconds
    few_experts, many_experts = times.verify_experts
    expert_seconds = max(0.0, (most - one) / max(1, many_experts - few_experts))
    # Where noise makes experts look dearer than a whole pass, they are all of it.
    expert_seconds = min(expert_seconds, one / few_experts)
    return Hardware(bandwidth, one - few_experts * expert_seconds, expert_seconds, times.draft_seconds)


def draft_expectation(
    plan: ModelPlan,
    choices: Choices,
    sizes: ModelSizes,
    top_k: int,
    times: PassTimes,
    tokens: Sequence[ProfiledToken],
    bandwidth: float,
) -> Expectation:
    """What the governor begins with; `tokens` are of the model's profile, or none."""
    machine = hardware(times, bandwidth)
    # Visits by passes over 1, 2, ... tokens, if routing were random. Real ones are fewer, and grow in the same way.
    pass_experts = [
        sum(
            distinct_experts(layer.num_experts, min(top_k, layer.num_experts), num_tokens)
            for layer in sizes.layout.layers
        )
        for num_tokens in range(1, MAX_DRAFT_LENGTH + 2)
    ]
    missed_bytes = (1 - plan.num_slots / plan.num_experts) * plan.expert_bytes
    ends = (pass_experts[0], pass_experts[-1])
    if choices.draft is None:
        # An n-gram's confidence says how long it was, which says little.
        rate, rates = NGRAM_ACCEPTANCE_RATE, [NGRAM_ACCEPTANCE_RATE] * NUM_CONFIDENCE_BINS
    else:
        rate, rates = _acceptance(tokens)
    return Expectation(
        acceptance_rate=rate,
        acceptance_by_confidence=rates,
        draft_seconds=times.draft_seconds if choices.draft else 0.0,
        pass_experts=pass_experts,
        verify_seconds=[machine.pass_seconds + num_experts * machine.expert_seconds for num_experts in ends],
        transfer_bytes=[num_experts * missed_bytes for num_experts in ends],
        bandwidth=bandwidth,
    )


def _acceptance(tokens: Sequence[ProfiledToken]) -> tuple[float, list[float]]:
    """How often drafted tokens are accepted: on the whole, and by the draft's confidence."""
    accepted = PRIOR_WEIGHT * ACCEPTANCE_RATE
    judged = PRIOR_WEIGHT
    # An unsure draft is right more often than it says.
    accepted_by_bin = [
        PRIOR_WEIGHT * (1 + (index + 0.5) / NUM_CONFIDENCE_BINS) / 2 for index in range(NUM_CONFIDENCE_BINS)
    ]
    judged_by_bin = [PRIOR_WEIGHT] * NUM_CONFIDENCE_BINS
    for token in tokens[1:]:  # nothing is proposed before the first
        index = confidence_bin(token.confidence)
        accepted += token.is_drafted
        judged += 1
        accepted_by_bin[index] += token.is_drafted
        judged_by_bin[index] += 1
    return accepted / judged, [a / b for a, b in zip(accepted_by_bin, judged_by_bin, strict=True)]
