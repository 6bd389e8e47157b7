"""Prompt lookup: what followed the longest suffix that occurred before, found the slow way too."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from engine.model.kv_cache import KvCache
from engine.phases import PhaseClock
from engine.sampling import Choice
from engine.speculative.cycle import Cycle
from engine.speculative.draft import NO_DRAFT, Draft, NgramDrafter
from engine.speculative.governor import DraftControl, DraftState, FixedLength
from engine.speculative.ngram import MAX_NGRAM, MIN_NGRAM, lookup
from tests.engine.tiny import VOCAB_SIZE, mixtral_config

texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def slow_lookup(text: list[int], max_tokens: int) -> tuple[list[int], int]:
    for size in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
        suffix = text[len(text) - size :] if size <= len(text) else None
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == suffix:
                return text[start + size : start + size + max_tokens], size
    return [], 0


@given(texts, st.integers(0, 8))
def test_lookup_is_what_the_slow_one_finds(text: list[int], max_tokens: int) -> None:
    found, size = lookup(text, max_tokens)
    event(f"suffix of {size}")
    assert (found, size) == slow_lookup(text, max_tokens)


@given(texts, st.integers(1, 8))
def test_what_is_found_followed_the_suffix(text: list[int], max_tokens: int) -> None:
    found, size = lookup(text, max_tokens)
    assert len(found) <= max_tokens
    assert bool(found) == bool(size)
    pattern = text[len(text) - size :] + found
    assert any(text[start : start + len(pattern)] == pattern for start in range(len(text)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 1, 2], ([3, 1, 2], 2)),
        ([1, 2, 3, 9, 1, 2, 4, 1, 2], ([4, 1, 2], 2)),  # the last time, not the first
        ([9, 1, 2, 3, 8, 1, 2, 7, 9, 1, 2], ([3, 8, 1, 2], 3)),  # the longest, not the last
        ([5, 5, 5, 5, 5, 5], ([5], 4)),  # a suffix may overlap what it follows
        ([1, 2, 3, 2], ([], 0)),  # of a single token, almost anything may follow
        ([1, 2], ([], 0)),
        ([1], ([], 0)),
        ([1, 2, 3, 4], ([], 0)),
    ],
)
def test_examples(text: list[int], expected: tuple[list[int], int]) -> None:
    assert lookup(text, 4) == expected


# The drafter.


class Watched(FixedLength):
    """Notes what it was asked with."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.asked: list[int] = []

    def wants_token(self, draft: DraftState) -> bool:
        assert draft.transfer_bytes is None
        self.asked.append(len(draft.confidences))
        return super().wants_token(draft)

    def cycle_ended(self, cycle: Cycle) -> None:
        raise AssertionError("that is for the step loop to tell")


def propose(text: Sequence[int], max_tokens: int, control: DraftControl) -> Draft:
    """Without any model, to choose by or to fill the cache."""

    def choose(logits: torch.Tensor) -> Choice:
        raise AssertionError("nothing is drawn")

    cache = KvCache(mixtral_config(), 16)
    draft = NgramDrafter(VOCAB_SIZE, PhaseClock()).propose(text, max_tokens, choose, cache, control)
    assert cache.num_tokens == 0
    return draft


@given(texts, st.integers(0, 8), st.integers(0, 8))
def test_as_many_are_proposed_as_are_found_and_wanted(text: list[int], max_tokens: int, length: int) -> None:
    found, _ = lookup(text, max_tokens)
    control = Watched(length)
    draft = propose(text, max_tokens, control)
    num_tokens = min(len(found), length)
    assert draft.token_ids == found[:num_tokens]
    assert not draft.is_planned
    assert control.asked == list(range(num_tokens + (num_tokens < len(found))))
    assert all(probs.tolist() == [float(token == t) for t in range(VOCAB_SIZE)] for token, probs in pairs(draft))
    assert len(draft.confidences) == num_tokens
    assert all(0 < confidence < 1 for confidence in draft.confidences)


def pairs(draft: Draft) -> list[tuple[int, torch.Tensor]]:
    return list(zip(draft.token_ids, draft.probs, strict=True))


def test_a_longer_suffix_is_more_to_be_trusted() -> None:
    confidences = [propose([*suffix, 9, *suffix], 1, FixedLength(1)).confidences for suffix in ([1, 2], [0, 1, 2, 3])]
    assert confidences[0] < confidences[1]


def test_where_nothing_is_found_nothing_is_proposed() -> None:
    draft = propose([1, 2, 3], 4, FixedLength(4))
    assert draft == NO_DRAFT
