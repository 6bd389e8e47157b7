import statistics

import numpy as np
import pytest

from benchmarks.synthetic import (
    FITTED,
    RANDOM,
    Locality,
    chance_overlap,
    fit,
    log_popularity,
    overlap,
    synthesize,
)
from engine.profile import ProfiledToken

STRONG = Locality(skew=1.2, reuse=0.5, guess_accuracy=(0.9, 0.6), draft_agreement=0.7, acceptance=0.6)
LOCALITIES = [FITTED, RANDOM, STRONG]
NUM_LAYERS = 6
every_locality = pytest.mark.parametrize("locality", LOCALITIES, ids=["fitted", "random", "strong"])
every_shape = pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (64, 6)])


def text(locality: Locality, num_experts: int, top_k: int, num_tokens: int = 400) -> list[ProfiledToken]:
    return synthesize((num_experts,) * NUM_LAYERS, top_k, locality, num_tokens)


def layers(tokens: list[ProfiledToken]) -> list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    return [np.array([token.routes[layer] for token in tokens]) for layer in range(NUM_LAYERS)]


@every_shape
@every_locality
def test_the_next_token_uses_as_many_experts_again(locality: Locality, num_experts: int, top_k: int) -> None:
    chance = chance_overlap(num_experts, top_k, locality.skew)
    repeated = statistics.mean(overlap(a[1:], a[:-1]) for a in layers(text(locality, num_experts, top_k)))
    assert repeated == pytest.approx(chance + locality.reuse * (1 - chance), abs=0.03)


@every_shape
@every_locality
def test_experts_are_as_popular_as_their_weights_make_them(locality: Locality, num_experts: int, top_k: int) -> None:
    """Though tokens repeat one another: a first choice is one draw by weight."""
    weights = np.exp(log_popularity(num_experts, locality.skew))
    half = num_experts // 2
    shares = []
    for routes in layers(text(locality, num_experts, top_k, 1200)):
        # One part of the text says which experts are the popular ones, the other one how popular they are.
        popular = np.argsort(np.bincount(routes[:800].flatten(), minlength=num_experts))[half:]
        shares.append(np.isin(routes[800:, 0], popular).mean())
    assert statistics.mean(shares) == pytest.approx(weights[half:].sum() / weights.sum(), abs=0.05)


def test_without_skew_and_reuse_nothing_but_chance_is_in_common() -> None:
    assert chance_overlap(64, 6, 0.0) == pytest.approx(6 / 64, abs=0.01)
    assert overlap(*(layers(text(RANDOM, 64, 6))[layer] for layer in (0, 1))) == pytest.approx(6 / 64, abs=0.01)


@every_locality
def test_a_fit_finds_the_parameters_again(locality: Locality) -> None:
    found = fit(text(locality, 8, 2, 600), 8)
    assert found.skew == pytest.approx(locality.skew, abs=0.2)
    assert found.reuse == pytest.approx(locality.reuse, abs=0.05)
    assert found.guess_accuracy == pytest.approx(locality.guess_accuracy, abs=0.04)
    assert found.draft_agreement == pytest.approx(locality.draft_agreement, abs=0.04)
    assert found.acceptance == pytest.approx(locality.acceptance, abs=0.05)


def test_confidences_are_right() -> None:
    tokens = synthesize((4,), 1, STRONG, 3000)
    sure = [token.is_drafted for token in tokens if token.confidence > STRONG.acceptance]
    unsure = [token.is_drafted for token in tokens if token.confidence < STRONG.acceptance]
    assert statistics.mean(sure) > STRONG.acceptance + 0.1
    assert statistics.mean(unsure) < STRONG.acceptance - 0.1


def test_each_layer_chooses_among_its_own_experts() -> None:
    tokens = synthesize((4, 2, 16), 4, FITTED, 20)
    for token in tokens:
        for routes in (token.routes, token.draft_routes):
            assert [len(set(experts)) for experts in routes] == [4, 2, 4]
        assert [max(experts) < count for experts, count in zip(token.routes, (4, 2, 16), strict=True)] == [True] * 3
        assert [[len(experts) for experts in ahead] for ahead in token.guesses] == [[2, 4], [4], []]


def test_the_same_seed_gives_the_same_text() -> None:
    assert synthesize((4,), 2, FITTED, 5, seed=1) == synthesize((4,), 2, FITTED, 5, seed=1)
    assert synthesize((4,), 2, FITTED, 5, seed=1) != synthesize((4,), 2, FITTED, 5, seed=2)
