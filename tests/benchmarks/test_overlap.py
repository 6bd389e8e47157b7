from collections.abc import Sequence

import pytest

from benchmarks.overlap import OverlappingSimulation
from benchmarks.synthetic import FITTED, synthesize
from engine.profile import ProfiledToken
from engine.simulation import Decoding, Hardware, Shape, Simulation
from engine.speculative.governor import FixedLength
from tests.engine.texts import token

EXPERT_BYTES = 10 * 4096


def tpot_seconds(
    simulation: type[Simulation],
    text: Sequence[ProfiledToken],
    hardware: Hardware,
    length: int | None,
    num_slots: int,
    experts_per_layer: Sequence[int],
) -> float:
    control = None if length is None else FixedLength(length)
    decoding = Decoding(num_slots, "lookahead", control, has_guesses=False)
    return simulation(Shape(experts_per_layer, EXPERT_BYTES), hardware, decoding).run(text, 0).tpot_seconds


def both(
    text: Sequence[ProfiledToken],
    hardware: Hardware,
    length: int | None,
    num_slots: int = 2,
    experts_per_layer: Sequence[int] = (2,),
) -> tuple[float, float]:
    """In turn, and overlapped."""
    in_turn, overlapped = (
        tpot_seconds(simulation, text, hardware, length, num_slots, experts_per_layer)
        for simulation in (Simulation, OverlappingSimulation)
    )
    return in_turn, overlapped


def test_passes_in_a_wait_are_saved_where_everything_is_accepted() -> None:
    """Cycles of two tokens with two draft passes, which foresee nothing: each waits 1 s for one expert of the one slot.

    A draft of one has time for one pass in it, at most.
    """
    text = [token([[(n // 2) % 2]], draft_routes=[[1 - (n // 2) % 2]]) for n in range(8)]
    hardware = Hardware(EXPERT_BYTES / 1.0, pass_seconds=1.0, expert_seconds=0.5, draft_seconds=0.25)
    in_turn, overlapped = both(text, hardware, 1, num_slots=1)
    # Of four cycles, all but the first have one pass less.
    assert in_turn - overlapped == pytest.approx(3 * 0.25 / 8)


@pytest.mark.parametrize("rejected", ["a drafted token", "the bonus token"])
def test_nothing_is_saved_where_the_draft_was_wrong(rejected: str) -> None:
    """Drafts of two tokens: positions 1 and 2, then 3 is the bonus token. Two passes fit into each wait."""
    wrong = (2, 5, 8) if rejected == "a drafted token" else (3, 6, 9)
    cycle = 2 if rejected == "a drafted token" else 3
    text = [
        token([[(n // cycle) % 2]], draft_routes=[[1 - (n // cycle) % 2]], is_drafted=n not in wrong) for n in range(12)
    ]
    hardware = Hardware(EXPERT_BYTES / 1.0, pass_seconds=1.0, expert_seconds=0.5, draft_seconds=0.25)
    in_turn, overlapped = both(text, hardware, 2, num_slots=1)
    assert overlapped == pytest.approx(in_turn)


def test_without_waits_nothing_changes() -> None:
    text = [token([[n % 2]]) for n in range(12)]
    hardware = Hardware(1e12, pass_seconds=1.0, expert_seconds=0.5, draft_seconds=0.25)
    in_turn, overlapped = both(text, hardware, 2)
    assert overlapped == pytest.approx(in_turn)


def test_without_a_draft_nothing_changes() -> None:
    text = synthesize((8,) * 4, 2, FITTED, 30)
    hardware = Hardware(EXPERT_BYTES / 0.1, pass_seconds=0.5, expert_seconds=0.02, draft_seconds=0.2)
    in_turn, overlapped = both(text, hardware, None, 8, (8,) * 4)
    assert overlapped == in_turn


@pytest.mark.parametrize("seconds", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("length", [2, 4, 8])
def test_overlapping_is_never_much_slower(seconds: float, length: int) -> None:
    """Per expert and on its way; a draft pass takes 0.2 s."""
    text = synthesize((8,) * 8, 2, FITTED, 80)
    hardware = Hardware(EXPERT_BYTES / seconds, pass_seconds=0.5, expert_seconds=0.02, draft_seconds=0.2)
    in_turn, overlapped = both(text, hardware, length, 24, (8,) * 8)
    assert overlapped <= 1.02 * in_turn
    if seconds == 0.2:
        assert overlapped < in_turn
