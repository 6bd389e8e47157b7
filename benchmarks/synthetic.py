"""Made-up routes with the locality of real ones, for models of which there is nothing here but the dimensions.

A router's scores are the logarithm of an expert's popularity plus Gumbel noise, so that its choice is a draw without
replacement by popularity. From token to token each expert keeps its noise with a probability, which makes choices alike
without changing how often an expert is chosen in all. Guesses and the draft's routes see the true noise like that too,
and layers know nothing of one another.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.profile import ProfiledToken
from engine.speculative.lookahead import DEPTH

Floats = npt.NDArray[np.float64]
Chosen = npt.NDArray[np.int64]
"""Experts of many tokens, the most probable first, [T, K]."""

NUM_SAMPLES = 2000
"""From which the noise that a locality asks for is told."""
CONFIDENCE_WEIGHT = 4.0
"""Confidences are drawn from a beta distribution of this weight around the rate of acceptance, and are right."""
FAR_TOKENS = 16
"""So far apart, tokens have no more experts in common than their popularity makes them."""


class Locality(NamedTuple):
    """How much routes have in common."""

    skew: float
    """Standard deviation of the logarithm of popularity over a layer's experts; 0: all are as popular."""
    reuse: float
    """Beyond chance, the share of a token's experts that the next one uses too; 0: tokens are independent."""
    guess_accuracy: Sequence[float]
    """Share of a layer's experts that the hidden states of one layer before name, of two layers before, ..."""
    draft_agreement: float
    """How often the draft names exactly a layer's experts."""
    acceptance: float
    """How often a drafted token is accepted."""


FITTED = Locality(skew=0.6, reuse=0.15, guess_accuracy=(0.83, 0.78), draft_agreement=0.909, acceptance=0.9)
"""Skew, reuse and guesses by `fit` of the demo's profile; the draft by the Specter paper's figures of real models."""
RANDOM = FITTED._replace(skew=0.0, reuse=0.0)
"""Where caches help least."""
LOCALITIES = {"fitted": FITTED, "random": RANDOM}


def synthesize(
    experts_per_layer: Sequence[int], top_k: int, locality: Locality, num_tokens: int, seed: int = 0
) -> list[ProfiledToken]:
    """A text's tokens as a profile would have them."""
    random = np.random.default_rng(seed)
    layers = [_Layer(count, min(top_k, count), locality, num_tokens, random) for count in experts_per_layer]
    likely, unlikely = (max(CONFIDENCE_WEIGHT * rate, 1e-9) for rate in (locality.acceptance, 1 - locality.acceptance))
    confidences = random.beta(likely, unlikely, num_tokens)
    is_drafted = random.random(num_tokens) < confidences
    return [
        ProfiledToken(
            routes=[layer.routes[token].tolist() for layer in layers],
            draft_routes=[layer.draft_routes[token].tolist() for layer in layers],
            is_drafted=bool(is_drafted[token]),
            confidence=float(confidences[token]),
            guesses=[
                [
                    target.guesses[ahead][token].tolist()
                    for ahead, target in enumerate(layers[index + 1 : index + 1 + DEPTH])
                ]
                for index in range(len(layers))
            ],
        )
        for token in range(num_tokens)
    ]


class _Layer:
    """Routes of one layer for all tokens, with what was guessed and drafted of them."""

    def __init__(
        self, num_experts: int, top_k: int, locality: Locality, num_tokens: int, random: np.random.Generator
    ) -> None:
        popularity = random.permutation(log_popularity(num_experts, locality.skew))
        kept = kept_noise(num_experts, top_k, locality)
        noise = random.gumbel(size=(num_tokens, num_experts))
        is_kept = random.random(noise.shape) < kept.reuse
        for token in range(1, num_tokens):
            noise[token] = np.where(is_kept[token], noise[token - 1], noise[token])

        def seen(share: float) -> Chosen:
            return _chosen(popularity + _mixed(noise, share, random), top_k)

        self.routes = seen(1.0)
        self.draft_routes = seen(kept.draft)
        self.guesses = [seen(share) for share in kept.guesses]


class KeptNoise(NamedTuple):
    """The probabilities with which an expert's noise is the same."""

    reuse: float
    """As for the token before."""
    guesses: Sequence[float]
    draft: float


def kept_noise(num_experts: int, top_k: int, locality: Locality) -> KeptNoise:
    """What gives routes of such layers the locality."""
    chance = chance_overlap(num_experts, top_k, locality.skew)

    def share_for(measure: Callable[[Chosen, Chosen], float], target: float) -> float:
        return _share_for(num_experts, top_k, locality.skew, measure, target)

    return KeptNoise(
        reuse=share_for(overlap, chance + locality.reuse * (1 - chance)),
        guesses=[share_for(overlap, accuracy) for accuracy in locality.guess_accuracy],
        draft=share_for(agreement, locality.draft_agreement),
    )


def log_popularity(num_experts: int, skew: float) -> Floats:
    """Of a layer's experts, the most popular last: quantiles of a normal distribution."""
    return np.array([NormalDist().inv_cdf((rank + 0.5) / num_experts) for rank in range(num_experts)]) * skew


def chance_overlap(num_experts: int, top_k: int, skew: float) -> float:
    """Share of a token's experts that another one has too, where nothing but popularity makes them alike."""
    return overlap(*_samples(num_experts, top_k, skew, 0.0))


def overlap(a: Chosen, b: Chosen) -> float:
    """Share of the first experts that are among the second, row by row."""
    return float((a[:, :, None] == b[:, None, :]).any(axis=-1).mean())


def agreement(a: Chosen, b: Chosen) -> float:
    """How often two rows have the same experts."""
    return float((np.sort(a) == np.sort(b)).all(axis=-1).mean())


def fit(tokens: Sequence[ProfiledToken], num_experts: int) -> Locality:
    """The locality of a profile with guesses and a draft, of a model whose layers have so many experts each."""
    layers = [np.array(routes) for routes in zip(*(token.routes for token in tokens), strict=True)]
    drafted = [np.array(routes) for routes in zip(*(token.draft_routes for token in tokens), strict=True)]
    top_k = layers[0].shape[1]
    lags = range(FAR_TOKENS, len(tokens) // 2)
    chance = statistics.mean(overlap(layer[lag:], layer[:-lag]) for lag in lags for layer in layers)
    near = statistics.mean(overlap(layer[1:], layer[:-1]) for layer in layers)
    return Locality(
        skew=_bisect(lambda skew: chance_overlap(num_experts, top_k, skew), chance, 0.0, 4.0),
        reuse=max(0.0, (near - chance) / (1 - chance)),
        guess_accuracy=[_guess_accuracy(tokens, layers, ahead) for ahead in range(DEPTH)],
        draft_agreement=statistics.mean(map(agreement, layers, drafted)),
        acceptance=statistics.mean(token.is_drafted for token in tokens[1:]),
    )


def _guess_accuracy(tokens: Sequence[ProfiledToken], layers: Sequence[Chosen], ahead: int) -> float:
    return statistics.mean(
        overlap(layers[index + 1 + ahead], np.array([token.guesses[index][ahead] for token in tokens]))
        for index in range(len(layers) - 1 - ahead)
    )


@cache
def _share_for(
    num_experts: int, top_k: int, skew: float, measure: Callable[[Chosen, Chosen], float], target: float
) -> float:
    """How much noise must be the same for routes to be as alike as the target says."""
    return _bisect(lambda share: measure(*_samples(num_experts, top_k, skew, share)), target, 0.0, 1.0)


def _samples(num_experts: int, top_k: int, skew: float, share: float) -> tuple[Chosen, Chosen]:
    """Routes of two tokens that have this share of their noise in common, many times over; always the same ones."""
    noise, other, draws = _noise(num_experts)
    popularity = log_popularity(num_experts, skew)
    return _chosen(popularity + noise, top_k), _chosen(popularity + np.where(draws < share, noise, other), top_k)


@cache
def _noise(num_experts: int) -> tuple[Floats, Floats, Floats]:
    random = np.random.default_rng(0)
    shape = (NUM_SAMPLES, num_experts)
    return random.gumbel(size=shape), random.gumbel(size=shape), random.random(shape)


def _mixed(noise: Floats, share: float, random: np.random.Generator) -> Floats:
    """The noise, of which this share is the same and the rest new."""
    return np.where(random.random(noise.shape) < share, noise, random.gumbel(size=noise.shape))


def _chosen(scores: Floats, top_k: int) -> Chosen:
    best = np.argpartition(-scores, top_k - 1, axis=-1)[:, :top_k]
    order = np.argsort(-np.take_along_axis(scores, best, axis=-1), axis=-1)
    return np.take_along_axis(best, order, axis=-1)


def _bisect(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where the function, which grows, comes to the target; the nearer end where it does not."""
    if function(low) >= target:
        return low
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) >= target else (middle, high)
    return high
