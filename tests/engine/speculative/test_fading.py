import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculative.fading import FadingLine, FadingRate, FadingRatio

numbers = st.floats(0.01, 100)
observations = st.lists(st.tuples(numbers, numbers), max_size=30)
SIZES = [10 * (1 - 0.9**num_tokens) for num_tokens in range(1, 34)]


@given(numbers, observations)
def test_a_ratio_lies_between_what_was_expected_and_what_was_observed(
    expected: float, seen: list[tuple[float, float]]
) -> None:
    ratio = FadingRatio(expected)
    assert ratio.value == pytest.approx(expected)
    for numerator, denominator in seen:
        ratio.add(numerator, denominator)
    values = [expected, *(numerator / denominator for numerator, denominator in seen)]
    assert min(values) * (1 - 1e-9) <= ratio.value <= max(values) * (1 + 1e-9)


@given(numbers, numbers, st.floats(0.1, 10))
def test_in_time_a_ratio_is_what_is_observed_whatever_was_expected(expected: float, real: float, size: float) -> None:
    ratio = FadingRatio(expected)
    for _ in range(400):
        ratio.add(real * size, size)
    assert ratio.value == pytest.approx(real, rel=1e-3)


def test_a_ratio_is_one_of_sums_not_a_mean_of_ratios() -> None:
    ratio = FadingRatio(1.0, weight=1e-12)
    ratio.add(1.0, 1.0)
    ratio.add(90.0, 9.0)
    assert ratio.value == pytest.approx(9.1, abs=0.1)


def test_what_is_new_counts_more() -> None:
    ratio = FadingRatio(1.0)
    ratio.add(2.0, 1.0)
    ratio.add(4.0, 1.0)
    other = FadingRatio(1.0)
    other.add(4.0, 1.0)
    other.add(2.0, 1.0)
    assert ratio.value > other.value


def test_a_heavier_expectation_gives_way_more_slowly() -> None:
    light, heavy = FadingRatio(1.0, weight=1.0), FadingRatio(1.0, weight=10.0)
    for ratio in (light, heavy):
        ratio.add(5.0, 1.0)
    assert 1.0 < heavy.value < light.value < 5.0


@given(st.floats(0.0, 1.0), st.lists(st.booleans(), max_size=200))
def test_a_rate_is_one(expected: float, seen: list[bool]) -> None:
    rate = FadingRate(expected)
    for is_so in seen:
        before = rate.value
        rate.happened(is_so)
        assert rate.value >= before if is_so else rate.value <= before
        assert 0.0 <= rate.value <= 1.0


@given(numbers, st.floats(0, 100))
def test_a_line_begins_as_expected(one: float, growth: float) -> None:
    line = FadingLine(SIZES, (one, one + growth))
    middle = 7
    share = (SIZES[middle - 1] - SIZES[0]) / (SIZES[-1] - SIZES[0])
    assert line.at(1) == pytest.approx(one, rel=0.1, abs=0.1 * growth)
    assert line.at(middle) == pytest.approx(one + growth * share, rel=0.1, abs=0.1 * growth)
    assert line.at(len(SIZES)) == pytest.approx(one + growth, rel=0.1)


@given(numbers, st.floats(0, 100), st.lists(st.tuples(st.integers(1, len(SIZES)), numbers), max_size=40))
def test_a_line_never_falls_and_is_never_nothing(one: float, growth: float, seen: list[tuple[int, float]]) -> None:
    line = FadingLine(SIZES, (one, one + growth))
    for num_tokens, value in seen:
        line.add(num_tokens, value)
        values = [line.at(n) for n in range(1, len(SIZES) + 1)]
        assert values == sorted(values)
        assert values[0] > 0


@given(numbers, numbers, st.floats(0.1, 10), st.lists(st.integers(1, len(SIZES)), min_size=3, max_size=8))
def test_passes_of_several_lengths_tell_the_line(
    expected: float, intercept: float, slope: float, lengths: list[int]
) -> None:
    line = FadingLine(SIZES, (expected, 3 * expected))
    lengths = [*lengths, 1, len(SIZES)]
    for _ in range(200):
        for num_tokens in lengths:
            line.add(num_tokens, intercept + slope * SIZES[num_tokens - 1])
    for num_tokens in (1, 5, len(SIZES)):
        assert line.at(num_tokens) == pytest.approx(intercept + slope * SIZES[num_tokens - 1], rel=0.05)


@given(numbers, st.floats(1.0, 4.0), st.integers(1, len(SIZES)), numbers)
def test_passes_of_one_length_tell_the_level_and_leave_the_expected_growth(
    one: float, growth: float, num_tokens: int, value: float
) -> None:
    line = FadingLine(SIZES, (one, growth * one))
    for _ in range(600):
        line.add(num_tokens, value)
    shape = [one + (growth - 1) * one * (size - SIZES[0]) / (SIZES[-1] - SIZES[0]) for size in SIZES]
    for other in (1, num_tokens, len(SIZES)):
        assert line.at(other) == pytest.approx(value * shape[other - 1] / shape[num_tokens - 1], rel=0.02)


def test_what_takes_nothing_grows_by_nothing() -> None:
    line = FadingLine(SIZES, (0.0, 0.0))
    assert line.at(1) == line.at(9) == 0.0
    constant = FadingLine([1.0] * 5, (2.0, 2.0))
    constant.add(3, 4.0)
    assert constant.at(1) == constant.at(5) > 2.0
