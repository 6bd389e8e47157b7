"""Belady's optimum beside all that can be evicted, on traces small enough to try."""

import itertools
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.eviction import OPTIMUM, POLICIES, Belady, Visit, count_hits, hit_rates, visits_of
from benchmarks.synthetic import FITTED, RANDOM, Locality, synthesize
from engine.experts.layout import ExpertId
from tests.engine.texts import token

EXPERTS_PER_LAYER = (3, 3)
LEAST_SLOTS = 2


def layers_of(experts_per_layer: Sequence[int]) -> st.SearchStrategy[list[list[int]]]:
    """Visits of one token: one or two different experts of each layer."""
    return st.tuples(
        *(st.lists(st.integers(0, count - 1), min_size=1, max_size=2, unique=True) for count in experts_per_layer)
    ).map(list)


texts = st.lists(layers_of(EXPERTS_PER_LAYER), min_size=1, max_size=5)


def visits_by(routes: list[list[list[int]]]) -> list[Visit]:
    return visits_of([token(experts) for experts in routes])


def most_hits(visits: Sequence[Visit], num_slots: int) -> int:
    """By trying every choice."""

    @cache
    def most(time: int, resident: frozenset[ExpertId]) -> int:
        if time == len(visits):
            return 0
        visit = frozenset(visits[time])
        idle = resident - visit
        num_evicted = max(0, len(resident | visit) - num_slots)
        return len(resident & visit) + max(
            most(time + 1, (resident | visit) - set(evicted)) for evicted in itertools.combinations(idle, num_evicted)
        )

    return most(0, frozenset())


@given(texts, st.integers(LEAST_SLOTS, 5))
def test_belady_has_as_many_hits_as_any_choice(routes: list[list[list[int]]], num_slots: int) -> None:
    visits = visits_by(routes)
    assert count_hits(visits, num_slots, Belady(visits)) == most_hits(visits, num_slots)


@given(texts, st.integers(LEAST_SLOTS, 6))
def test_no_policy_has_more_hits(routes: list[list[list[int]]], num_slots: int) -> None:
    rates = hit_rates(visits_by(routes), EXPERTS_PER_LAYER, num_slots)
    assert all(rates[name] <= rates[OPTIMUM] for name in POLICIES)


@pytest.mark.parametrize("locality", [FITTED, RANDOM])
@pytest.mark.parametrize("num_slots", [6, 16, 24])
def test_the_future_helps_on_longer_texts_too(locality: Locality, num_slots: int) -> None:
    visits = visits_of(synthesize((8,) * 4, 2, locality, 60))
    rates = hit_rates(visits, (8,) * 4, num_slots)
    assert all(rates[name] < rates[OPTIMUM] for name in POLICIES)


def test_with_a_slot_for_each_expert_only_first_visits_miss() -> None:
    visits = visits_of(synthesize((8,) * 4, 2, FITTED, 60))
    num_visited, num_different = sum(map(len, visits)), len(set(itertools.chain(*visits)))
    rates = hit_rates(visits, (8,) * 4, 32)
    assert list(rates.values()) == [1 - num_different / num_visited] * 3


def test_what_one_visit_needs_stays_together() -> None:
    """Two slots for 0 and 1, then 2 and 0: 1 has to go for 2, though it is the one that is needed next."""
    visits = visits_by([[[0, 1]], [[2, 0]], [[1, 2]]])
    assert count_hits(visits, 2, Belady(visits)) == 2
