"""Guesses at the next layers' experts, with routers that say what the test wants."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.experts.layout import ExpertId
from engine.speculative.lookahead import DEPTH, MAX_TOKENS, RouterLookahead

NUM_LAYERS = 4


class FakeRouters:
    """The hidden states are the choices [T, K], to which the router of layer n adds 10 n."""

    num_layers = NUM_LAYERS

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def choices(self, layer: int, ahead: int, hidden_states: torch.Tensor) -> torch.Tensor:
        self.asked.append((layer, ahead))
        return hidden_states.long() + 10 * (layer + ahead)


def predict(layer: int, choices: list[list[int]]) -> list[ExpertId] | None:
    return RouterLookahead(FakeRouters()).predict(layer, torch.tensor(choices, dtype=torch.float32))


def test_the_nearest_layer_comes_first_and_the_likeliest_expert_within_it() -> None:
    assert predict(0, [[3, 5]]) == [(1, 13), (1, 15), (2, 23), (2, 25)]
    assert predict(1, [[5, 3]]) == [(2, 25), (2, 23), (3, 35), (3, 33)]


def test_first_choices_of_all_tokens_come_before_second_ones_and_each_expert_once() -> None:
    assert predict(2, [[3, 5], [5, 1], [4, 3]]) == [(3, 33), (3, 35), (3, 34), (3, 31)]


def test_behind_the_last_layer_there_is_nothing_to_guess() -> None:
    assert predict(NUM_LAYERS - 2, [[1]]) == [(NUM_LAYERS - 1, 31)]
    assert predict(NUM_LAYERS - 1, [[1]]) == []


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_no_more_routers_are_asked_than_needed(layer: int) -> None:
    routers = FakeRouters()
    RouterLookahead(routers).predict(layer, torch.zeros(1, 1))
    assert routers.asked == [(layer, ahead) for ahead in range(1, DEPTH + 1) if layer + ahead < NUM_LAYERS]


def test_long_passes_are_not_guessed_for_and_short_ones_are() -> None:
    assert predict(0, [[3]] * MAX_TOKENS) == [(1, 13), (2, 23)]
    assert predict(0, [[3]] * (MAX_TOKENS + 1)) is None


@given(st.lists(st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True), min_size=1, max_size=5))
def test_all_choices_are_guessed(choices: list[list[int]]) -> None:
    predicted = predict(2, choices)
    assert predicted is not None
    assert len(predicted) == len(set(predicted))
    assert set(predicted) == {ExpertId(3, 30 + expert) for row in choices for expert in row}
