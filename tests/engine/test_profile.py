"""Profiles of the tiny model, beside what transformers says about the same text."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from engine.assembly import Parts, open_parts, open_store
from engine.device import open_device
from engine.model.dispatch import ExpertsImplementation
from engine.model.kv_cache import KvCache
from engine.profile import NUM_TOKENS, ProfiledToken, record_profile
from engine.speculative.lookahead import DEPTH
from tests.engine.harness import ignore_progress, load
from tests.engine.tiny import VOCAB_SIZE, mixtral_config, reference_model

NUM_LAYERS, TOP_K = 3, 2
LENGTH = 24


class Recorded(NamedTuple):
    tokens: list[ProfiledToken]
    token_ids: list[int]
    """Of the text, with the last one that was drawn and not passed left out."""
    counts: list[int]


@contextmanager
def opened(checkpoint: Path, cache: Path, **settings: object) -> Iterator[Parts]:
    loaded, config = load(checkpoint, cache, **settings)
    device = open_device("cpu")
    with (
        open_store(loaded.pack, 0, device, ignore_progress) as store,
        open_parts(loaded, config, store, 8, device) as parts,
    ):
        yield parts


def record(
    parts: Parts, max_model_len: int = LENGTH + 1, *, has_draft: bool = True, has_routers: bool = True
) -> Recorded:
    """A profile, and the text that it is of, which the model's full-precision passes tell."""
    model, draft = parts.loaded.model, parts.loaded.draft
    forward, passed, counts = model.forward, list[int](), list[int]()

    def listen(token_ids: list[int], cache: KvCache, experts: ExpertsImplementation) -> torch.Tensor:
        if experts is not draft:
            passed.extend(token_ids)
        return forward(token_ids, cache, experts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", listen)
        tokens = record_profile(
            model,
            parts.experts.planned,
            draft if has_draft else None,
            parts.routers if has_routers else None,
            first_token_id=1,
            max_model_len=max_model_len,
            on_token=counts.append,
        )
    return Recorded(tokens, passed, counts)


@pytest.fixture(scope="module")
def recorded(mixtral: Path, model_cache: Path) -> Iterator[Recorded]:
    """With a draft that is as good as exact."""
    with opened(mixtral, model_cache, draft_weights="qint8") as parts:
        yield record(parts)


def test_the_text_begins_with_the_token_that_was_given_and_fills_the_context(recorded: Recorded) -> None:
    assert recorded.token_ids[0] == 1
    assert len(recorded.token_ids) == len(recorded.tokens) == LENGTH
    assert all(0 <= token_id < VOCAB_SIZE for token_id in recorded.token_ids)
    assert len(set(recorded.token_ids)) > LENGTH / 3  # drawn, and not one token over and over
    assert recorded.counts == list(range(1, LENGTH + 1))


def test_a_long_context_is_not_filled(mixtral: Path, model_cache: Path) -> None:
    assert mixtral_config().max_position_embeddings > NUM_TOKENS + 1
    with opened(mixtral, model_cache, draft="none") as parts:
        assert len(record(parts, 256, has_draft=False).tokens) == NUM_TOKENS


def test_routes_are_those_of_one_pass_over_the_text(recorded: Recorded, mixtral: Path) -> None:
    model: Any = reference_model(mixtral)
    with torch.no_grad():
        output = model(torch.tensor([recorded.token_ids]), output_router_logits=True)
    for layer, logits in enumerate(output.router_logits):
        expected = logits.topk(TOP_K).indices.tolist()
        assert [token.routes[layer] for token in recorded.tokens] == expected
    assert all(len(token.routes) == NUM_LAYERS for token in recorded.tokens)


def test_a_draft_as_good_as_the_model_drafts_what_it_would(recorded: Recorded, mixtral: Path) -> None:
    first, *others = recorded.tokens
    assert (first.is_drafted, first.confidence) == (False, 0.0)  # nothing was proposed before it
    assert statistics.mean(token.is_drafted for token in others) > 0.9
    model: Any = reference_model(mixtral)
    with torch.no_grad():
        probabilities = model(torch.tensor([recorded.token_ids])).logits[0].softmax(dim=-1)
    for token, expected in zip(others, probabilities.max(dim=-1).values[:-1].tolist(), strict=True):
        assert token.confidence == pytest.approx(expected, abs=0.1)
    same = [
        set(routes) == set(drafted)
        for token in recorded.tokens
        for routes, drafted in zip(token.routes, token.draft_routes, strict=True)
    ]
    assert statistics.mean(same) > 0.9


def test_a_poor_draft_is_told_from_it(recorded: Recorded, mixtral: Path, model_cache: Path) -> None:
    with opened(mixtral, model_cache, draft_weights="qint2") as parts:
        poor = record(parts)
    assert poor.token_ids == recorded.token_ids  # the draft has no say in the text
    assert [token.routes for token in poor.tokens] == [token.routes for token in recorded.tokens]
    assert sum(token.is_drafted for token in poor.tokens) < sum(token.is_drafted for token in recorded.tokens)


def test_each_layer_guesses_the_next_ones(recorded: Recorded) -> None:
    for token in recorded.tokens:
        assert len(token.guesses) == NUM_LAYERS
        for layer, ahead in enumerate(token.guesses):
            assert len(ahead) == min(DEPTH, NUM_LAYERS - 1 - layer)
            assert all(len(set(experts)) == TOP_K and set(experts) <= set(range(6)) for experts in ahead)


def test_guesses_are_right_more_often_than_chance(recorded: Recorded) -> None:
    """Of the next layer's experts; one of three is right by chance."""
    shares = [
        len(set(token.guesses[layer][0]) & set(token.routes[layer + 1])) / TOP_K
        for token in recorded.tokens
        for layer in range(NUM_LAYERS - 1)
    ]
    assert statistics.mean(shares) > 0.4


def test_without_draft_and_routers_there_are_only_routes(mixtral: Path, model_cache: Path) -> None:
    with opened(mixtral, model_cache, draft="none") as parts:
        tokens = record(parts, has_draft=False, has_routers=False).tokens
    assert all(token.routes and not token.draft_routes and not token.guesses for token in tokens)
    assert not any(token.is_drafted for token in tokens)
