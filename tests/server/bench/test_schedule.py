from itertools import groupby

from server.bench.modes import parse_modes
from server.bench.schedule import Step, schedule, steps


def test_samplings_alternate_between_prompts_and_rounds() -> None:
    assert steps(["a", "b", "c"], 2) == [
        Step(0, "a", "greedy"),
        Step(0, "b", "sampled"),
        Step(0, "c", "greedy"),
        Step(1, "a", "sampled"),
        Step(1, "b", "greedy"),
        Step(1, "c", "sampled"),
    ]


def test_all_modes_take_turns_and_each_is_first_in_its_turn() -> None:
    turns = schedule(parse_modes("lru,plain,auto"), ["a", "b"], 2)
    order = [
        (step.prompt, [turn.mode.name for turn in group]) for step, group in groupby(turns, lambda turn: turn.step)
    ]
    assert order == [
        ("a", ["lru", "plain", "auto"]),
        ("b", ["plain", "auto", "lru"]),
        ("a", ["auto", "lru", "plain"]),
        ("b", ["lru", "plain", "auto"]),
    ]
