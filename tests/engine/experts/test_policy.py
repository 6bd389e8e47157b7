from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from engine.experts.layout import ExpertId
from engine.experts.policy import PerLayerLru

expert_ids = st.builds(ExpertId, st.integers(0, 2), st.integers(0, 3))


def policy_with(experts: Iterable[tuple[int, int]], num_slots: int = 6, num_layers: int = 3) -> PerLayerLru:
    policy = PerLayerLru(num_slots, num_layers)
    for expert in experts:
        policy.insert(ExpertId(*expert))
    return policy


def anything(expert: ExpertId) -> bool:
    return True


def test_the_least_recently_used_expert_of_the_layer_goes_first() -> None:
    policy = policy_with([(0, 0), (0, 1), (0, 2)])
    assert policy.victim(0, anything) == (0, 0)
    policy.touch(ExpertId(0, 0))
    assert policy.victim(0, anything) == (0, 1)
    policy.remove(ExpertId(0, 1))
    assert policy.victim(0, anything) == (0, 2)


def test_asking_changes_nothing() -> None:
    policy = policy_with([(0, 0), (0, 1)])
    assert policy.victim(0, anything) == policy.victim(0, anything) == (0, 0)


def test_a_layer_with_its_share_takes_from_itself_even_where_another_holds_more() -> None:
    policy = policy_with([(1, 0), (1, 1), (1, 2), (0, 0), (0, 1)])
    assert policy.victim(0, anything) == (0, 0)


def test_a_layer_below_its_share_takes_from_the_fullest() -> None:
    policy = policy_with([(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)])
    assert policy.victim(0, anything) == (2, 0)


def test_what_may_not_be_evicted_is_passed_over() -> None:
    policy = policy_with([(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)])
    assert policy.victim(0, lambda expert: expert != (0, 0)) == (0, 1)
    # Nothing of its own to give: then the fullest other layer.
    assert policy.victim(0, lambda expert: expert.layer != 0) == (2, 0)
    assert policy.victim(0, lambda expert: expert.layer == 1) == (1, 0)
    assert policy.victim(0, lambda expert: False) is None


def test_fewer_slots_than_layers_still_give_each_layer_a_share_of_one() -> None:
    policy = policy_with([(0, 0), (1, 0)], num_slots=2, num_layers=3)
    assert policy.victim(0, anything) == (0, 0)
    assert policy.victim(2, anything) in {(0, 0), (1, 0)}


@given(st.lists(st.tuples(st.sampled_from(["use", "remove"]), expert_ids)), st.integers(0, 2), st.sets(expert_ids))
def test_the_victim_is_the_oldest_allowed_one_of_some_layer(
    steps: list[tuple[str, ExpertId]], layer: int, allowed: set[ExpertId]
) -> None:
    policy = PerLayerLru(num_slots=6, num_layers=3)
    oldest_first: list[ExpertId] = []
    for step, expert in steps:
        known = expert in oldest_first
        if known:
            oldest_first.remove(expert)
        if step == "use":
            oldest_first.append(expert)
            (policy.touch if known else policy.insert)(expert)
        elif known:
            policy.remove(expert)

    by_layer = [[e for e in oldest_first if e.layer == index] for index in range(3)]
    candidates = [next((e for e in experts if e in allowed), None) for experts in by_layer]
    victim = policy.victim(layer, allowed.__contains__)
    own = candidates[layer]
    if len(by_layer[layer]) >= 2 and own is not None:
        assert victim == own
        return
    fullest = max((len(by_layer[index]) for index in range(3) if candidates[index] is not None), default=0)
    assert victim in {e for index, e in enumerate(candidates) if len(by_layer[index]) == fullest} - {None} or (
        victim is None and not any(candidates)
    )
