import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.experts.layout import ExpertId, ExpertLayout, LayerLayout
from engine.experts.planner import LookaheadBuffer, PrefillPlanner, Routes, expected_experts_share


def layout_with(*num_experts: int) -> ExpertLayout:
    return ExpertLayout(
        tuple(LayerLayout.of({"up_proj": torch.empty(count, 2, 2)}, is_transposed=False) for count in num_experts)
    )


def routes(*layers: list[list[int]]) -> Routes:
    return [torch.tensor(experts) for experts in layers]


def test_experts_come_by_layer_and_within_it_by_the_first_token_that_wants_them() -> None:
    lookahead = LookaheadBuffer()
    lookahead.add(routes([[5, 2]], [[0, 1]]))
    lookahead.add(routes([[2, 7]], [[3, 0]]))
    assert lookahead.predicted() == [(0, 5), (0, 2), (0, 7), (1, 0), (1, 1), (1, 3)]


def test_the_tokens_of_one_pass_count_in_their_order() -> None:
    lookahead = LookaheadBuffer()
    lookahead.add(routes([[3, 1], [1, 2]]))
    assert lookahead.predicted() == [(0, 3), (0, 1), (0, 2)]


def test_without_a_pass_nothing_is_predicted() -> None:
    assert LookaheadBuffer().predicted() == []


def test_passes_of_another_number_of_layers_are_a_mistake() -> None:
    lookahead = LookaheadBuffer()
    lookahead.add(routes([[0]], [[0]]))
    with pytest.raises(ValueError, match="zip"):
        lookahead.add(routes([[0]]))


@given(st.lists(st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2), min_size=3, max_size=3), max_size=6))
def test_the_plan_only_grows_and_names_each_expert_once(passes: list[list[list[int]]]) -> None:
    lookahead = LookaheadBuffer()
    wanted: set[ExpertId] = set()
    previous: list[ExpertId] = []
    for layers in passes:
        lookahead.add(routes(*([experts] for experts in layers)))
        wanted |= {ExpertId(layer, expert) for layer, experts in enumerate(layers) for expert in experts}
        predicted = lookahead.predicted()
        assert len(predicted) == len(set(predicted))
        assert set(predicted) == wanted
        assert [expert for expert in predicted if expert in previous] == previous
        assert [expert.layer for expert in predicted] == sorted(expert.layer for expert in predicted)
        previous = predicted


def test_a_long_chunk_of_the_prompt_wants_every_expert() -> None:
    layout = layout_with(4, 8)
    assert PrefillPlanner(layout, top_k=2).predicted(100) == list(layout.experts())


def test_a_short_one_streams_only_the_layers_that_it_fills() -> None:
    # Four tokens with 2 of 4 experts leave out 6%; with 2 of 16, more than half.
    planner = PrefillPlanner(layout_with(16, 4), top_k=2)
    assert planner.predicted(4) == [ExpertId(1, expert) for expert in range(4)]
    assert planner.predicted(1) == []


def test_layers_whose_experts_all_tokens_want_are_always_streamed() -> None:
    assert PrefillPlanner(layout_with(2), top_k=2).predicted(1) == [(0, 0), (0, 1)]


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "share"),
    [(0, 8, 2, 0.0), (1, 8, 2, 0.25), (2, 8, 2, 0.4375), (1, 4, 4, 1.0), (1000, 8, 2, 1.0)],
)
def test_share_of_the_experts_that_tokens_want(num_tokens: int, num_experts: int, top_k: int, share: float) -> None:
    assert expected_experts_share(num_tokens, num_experts, top_k) == pytest.approx(share)


def test_the_share_is_that_of_independent_routing() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(2000, 5, 16, generator=generator).topk(2, dim=-1).indices.flatten(1)
    shares = [len(set(row)) / 16 for row in drawn.tolist()]
    assert sum(shares) / len(shares) == pytest.approx(expected_experts_share(5, 16, 2), abs=0.01)
