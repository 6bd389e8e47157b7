import pytest

from server.bench.cell import Cell, CellRun, ModeRun
from server.bench.ratios import Sameness, ratios, sameness
from tests.server.bench.examples import PACED, mode_run, reply


def run(*modes: ModeRun) -> CellRun:
    return CellRun(Cell(10**9, PACED), list(modes))


def test_pairs_are_of_the_same_prompt() -> None:
    """In the second step all are slow: that is no difference between the modes."""
    lru, auto = mode_run("lru", reply(0.2), reply(0.8)), mode_run("auto", reply(0.1), reply(0.2))
    (first, best) = ratios(run(lru, auto))
    assert (first.name, first.ours, first.baseline, first.num_pairs) == ("auto/lru", "auto", "lru", 2)
    assert [first.median, first.low, first.high] == pytest.approx([3.0, 2.0, 4.0])
    assert (best.name, best.baseline) == ("auto/best fixed", "lru")


def test_all_pairs_of_a_full_run() -> None:
    names = ("on-demand", "lru", "plain", "ngram", "specter", "specter-4", "auto", "accelerate")
    found = ratios(run(*(mode_run(name, reply(0.1 * i)) for i, name in enumerate(names, 1))))
    assert [ratio.name for ratio in found] == [
        "plain/lru",
        "ngram/lru",
        "specter/lru",
        "specter-4/lru",
        "auto/lru",
        "lru/on-demand",
        "auto/accelerate",
        "specter/accelerate",
        "auto/best fixed",
    ]
    assert found[-1].baseline == "lru"


def test_modes_without_replies_to_the_same_have_no_ratio() -> None:
    assert ratios(run(mode_run("lru", reply()), mode_run("specter"))) == []


def test_greedy_replies_are_compared_as_far_as_both_go() -> None:
    """The first step is greedy and the second is not."""
    reference = mode_run("lru", reply(token_ids=[1, 2, 3, 4]), reply(token_ids=[1]))
    shorter = mode_run("accelerate", reply(token_ids=[1, 2]), reply(token_ids=[9]))
    other = mode_run("auto", reply(token_ids=[1, 2, 5, 4]))
    same = sameness(run(other, reference, shorter, mode_run("plain")), "lru")
    assert same == {"auto": Sameness("lru", 0, 1), "accelerate": Sameness("lru", 1, 1)}
    assert sameness(run(other, shorter), "lru") == {"accelerate": Sameness("auto", 1, 1)}
    assert sameness(run(mode_run("lru")), "lru") == {}
