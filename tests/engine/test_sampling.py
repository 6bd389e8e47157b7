import math

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from engine.protocol import SamplingParams
from engine.sampling import draw, is_greedy, target_distribution

# Well apart, so that rounding does not decide which token is the more probable one.
distinct_logits = st.lists(st.integers(-80, 80), min_size=1, max_size=10, unique=True).map(
    lambda values: [value / 8 for value in values]
)


def reference(logits: list[float], params: SamplingParams) -> list[float]:
    """The same in plain Python: one filter after the other, each on what the last one left, made to sum to 1."""

    def normalised(weights: list[float]) -> list[float]:
        return [weight / math.fsum(weights) for weight in weights]

    probs = normalised([math.exp((logit - max(logits)) / params.temperature) for logit in logits])
    ranking = sorted(range(len(probs)), key=lambda token: -probs[token])
    if params.top_k > 0:
        for token in ranking[params.top_k :]:
            probs[token] = 0.0
        probs = normalised(probs)
    if params.top_p < 1.0:
        before = 0.0
        filtered = list(probs)
        for rank, token in enumerate(ranking):
            assume(abs(before - params.top_p) > 1e-5)
            if rank > 0 and before >= params.top_p:
                filtered[token] = 0.0
            before += probs[token]
        probs = normalised(filtered)
    if params.min_p > 0.0:
        limit = params.min_p * max(probs)
        assume(all(abs(prob - limit) > 1e-5 or prob == max(probs) for prob in probs))
        probs = normalised([prob if prob >= limit or prob == max(probs) else 0.0 for prob in probs])
    return probs


@given(
    distinct_logits,
    st.floats(0.2, 5.0),
    st.integers(0, 12),
    st.one_of(st.just(1.0), st.floats(0.0, 1.0)),
    st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)
@example([3.0, 2.0, 1.0], 1.0, 0, 1.0, 0.0)
@example([3.0, 2.0, 1.0], 1.0, 2, 1.0, 0.0)
@example([3.0, 2.0, 1.0], 1.0, 0, 0.7, 0.0)
@example([3.0, 2.0, 1.0], 1.0, 0, 1.0, 0.2)
@example([3.0, 2.0, 1.0], 0.5, 2, 0.95, 0.1)
def test_filters_are_those_of_the_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = reference(logits, params)
    probs = target_distribution(torch.tensor(logits), params)
    # Exact for which tokens remain, as far as float32 can tell them from 0; close for how probable they are.
    assert [prob > 0 for prob in probs.tolist()] == [prob > 1e-44 for prob in expected]
    torch.testing.assert_close(probs, torch.tensor(expected), rtol=1e-4, atol=1e-6)


@given(
    st.lists(
        st.one_of(st.floats(-(2.0**100), 2.0**100, width=32), st.sampled_from([0.0, 1.0, -math.inf])),
        min_size=1,
        max_size=8,
    ),
    st.floats(0.0, exclude_min=True),
    st.integers(0, 9),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
)
@example([1.0, 2.0, 3.0], 1e-300, 0, 1.0, 0.0)
@example([1.0, 1.0, 0.0], 5e-324, 1, 0.0, 1.0)
def test_whatever_the_parameters_a_distribution_remains(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    assume(max(logits) > -math.inf)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = target_distribution(torch.tensor(logits), params)
    assert bool((probs >= 0).all())
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-5)
    # The most probable token is never filtered out.
    assert float(probs[logits.index(max(logits))]) > 0
    assert 0 <= draw(probs, torch.Generator().manual_seed(0)) < len(logits)


def test_a_tiny_temperature_is_greedy() -> None:
    probs = target_distribution(torch.tensor([1.0, 3.0, 2.0]), SamplingParams(temperature=1e-30))
    assert probs.tolist() == [0.0, 1.0, 0.0]


def test_rows_are_filtered_one_by_one() -> None:
    logits = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.8, top_k=8, top_p=0.8, min_p=0.05)
    together = target_distribution(logits, params)
    assert together.shape == logits.shape
    for row, alone in zip(together, logits, strict=True):
        torch.testing.assert_close(row, target_distribution(alone, params))


def test_tokens_as_probable_as_the_last_one_kept_are_kept_too() -> None:
    logits = torch.tensor([1.0, 5.0, 5.0, 5.0])
    assert (target_distribution(logits, SamplingParams(top_k=2)) > 0).tolist() == [False, True, True, True]
    assert (target_distribution(logits, SamplingParams(top_p=0.01)) > 0).tolist() == [False, True, True, True]
    assert (target_distribution(logits, SamplingParams(min_p=1.0)) > 0).tolist() == [False, True, True, True]


def test_half_precision_logits_become_float32_probabilities() -> None:
    assert target_distribution(torch.randn(4).to(torch.bfloat16), SamplingParams()).dtype is torch.float32


def test_only_temperature_zero_is_greedy() -> None:
    assert is_greedy(SamplingParams(temperature=0.0))
    assert not is_greedy(SamplingParams(temperature=1e-30))
    assert not is_greedy(SamplingParams())


def test_draws_follow_the_weights_and_the_generator() -> None:
    weights = torch.tensor([0.0, 3.0, 1.0, 0.0])  # need not sum to 1
    generator = torch.Generator().manual_seed(0)
    draws = [draw(weights, generator) for _ in range(2000)]
    assert set(draws) == {1, 2}
    assert draws.count(1) == pytest.approx(1500, abs=100)
    again = torch.Generator().manual_seed(0)
    assert draws[:20] == [draw(weights, again) for _ in range(20)]
