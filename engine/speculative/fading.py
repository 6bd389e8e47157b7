"""Running estimates in which old observations fade."""

from collections.abc import Sequence

DECAY = 0.95
"""What is left of an observation after one more."""
RATE_DECAY = 0.99
"""The same for what happens or not, which takes more observations to tell."""
RATE_PRIOR_WEIGHT = 10.0
PRIOR_WEIGHT = 4.0
"""Observations that an expectation counts for until there are real ones."""
PRIOR_SLOPE_WEIGHT = 0.1
"""How much the expected growth with a pass's tokens counts beside the measured one, which passes of one length lack."""


class FadingRatio:
    """A ratio of two sums."""

    def __init__(self, expected: float, weight: float = PRIOR_WEIGHT, decay: float = DECAY) -> None:
        """`weight` is that of the expectation, in the units of the denominator."""
        self._numerator, self._denominator = expected * weight, weight
        self._decay = decay

    @property
    def value(self) -> float:
        return self._numerator / self._denominator

    def add(self, numerator: float, denominator: float) -> None:
        self._numerator = self._decay * self._numerator + numerator
        self._denominator = self._decay * self._denominator + denominator


class FadingRate(FadingRatio):
    """How often something happens."""

    def __init__(self, expected: float) -> None:
        super().__init__(expected, RATE_PRIOR_WEIGHT, RATE_DECAY)

    def happened(self, is_so: bool) -> None:
        self.add(float(is_so), 1.0)


class FadingLine:
    """A quantity that grows with the experts that a pass visits, by least squares.

    Of the experts of a layer, more tokens want ever fewer that others do not want; so with their number (`sizes`) both
    the bytes and the computation of a pass grow in proportion, and not with its tokens.
    """

    def __init__(self, sizes: Sequence[float], expected: Sequence[float]) -> None:
        """`sizes[n - 1]` of a pass over n tokens, growing with n; `expected` for passes over one token and over all."""
        self._sizes = sizes
        one, most = expected
        self._growth = max(0.0, most - one) / (sizes[-1] - sizes[0]) / one if one and sizes[-1] > sizes[0] else 0.0
        """Expected, per size, as a share of the value for one token."""
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._add(sizes[0], one, PRIOR_WEIGHT / 2)
        self._add(sizes[-1], most, PRIOR_WEIGHT / 2)

    def add(self, num_tokens: int, value: float) -> None:
        self._weight, self._x, self._y, self._xx, self._xy = (
            DECAY * total for total in (self._weight, self._x, self._y, self._xx, self._xy)
        )
        self._add(self._sizes[num_tokens - 1], value, 1.0)

    def at(self, num_tokens: int) -> float:
        """Grows with the tokens, and is never less than a tenth of what was measured on average."""
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = max(0.0, self._xx / self._weight - mean_x**2)
        expected_slope = mean_y * self._growth / (1 + self._growth * (mean_x - self._sizes[0]))
        common = self._xy / self._weight - mean_x * mean_y
        slope = (common + PRIOR_SLOPE_WEIGHT * expected_slope) / (spread + PRIOR_SLOPE_WEIGHT)
        return max(mean_y + max(0.0, slope) * (self._sizes[num_tokens - 1] - mean_x), 0.1 * mean_y)

    def _add(self, x: float, y: float, weight: float) -> None:
        self._weight += weight
        self._x += weight * x
        self._y += weight * y
        self._xx += weight * x * x
        self._xy += weight * x * y
