"""Virtual time, by hand: with transfers of 0.1 s, passes that take 1 s without their experts, and 0.5 s per expert."""

from collections.abc import Sequence

import pytest

from engine.experts.bandwidth import piece_bytes
from engine.profile import ProfiledToken
from engine.simulation import Decoding, Hardware, Shape, Simulated, Simulation
from engine.speculative.governor import FixedLength
from tests.engine.texts import token

EXPERT_BYTES = 10 * 4096
BANDWIDTH = 10 * EXPERT_BYTES
HARDWARE = Hardware(bandwidth=BANDWIDTH, pass_seconds=1.0, expert_seconds=0.5, draft_seconds=0.25)
ON_DEMAND = Decoding(num_slots=2, policy="lru", control=None, has_guesses=False)


def simulate(
    text: Sequence[ProfiledToken],
    decoding: Decoding,
    *,
    warm_up_tokens: int = 0,
    hardware: Hardware = HARDWARE,
    experts_per_layer: Sequence[int] = (2,),
) -> Simulated:
    return Simulation(Shape(experts_per_layer, EXPERT_BYTES), hardware, decoding).run(text, warm_up_tokens)


def alternating(num_tokens: int) -> list[ProfiledToken]:
    return [token([[position % 2]]) for position in range(num_tokens)]


def test_experts_are_moved_in_several_pieces_here() -> None:
    assert piece_bytes(BANDWIDTH) < EXPERT_BYTES


def test_a_miss_waits_for_all_of_its_expert() -> None:
    simulated = simulate(alternating(4), ON_DEMAND._replace(num_slots=1))
    assert simulated.tpot_seconds == pytest.approx(1.0 + 0.1 + 0.5)
    assert simulated.wait_seconds == pytest.approx(0.1)
    assert simulated.transfer_bytes == EXPERT_BYTES
    assert simulated.hit_rate == 0.0
    assert simulated.link_load == pytest.approx(0.1 / 1.6)
    assert (simulated.tokens_per_cycle, simulated.draft_length) == (1.0, 0.0)


def test_what_is_resident_takes_its_computation_and_no_more() -> None:
    simulated = simulate(alternating(6), ON_DEMAND, warm_up_tokens=2)
    assert simulated.tpot_seconds == pytest.approx(1.5)
    assert (simulated.wait_seconds, simulated.transfer_bytes, simulated.link_load) == (0.0, 0, 0.0)
    assert simulated.hit_rate == 1.0


def test_the_warm_up_does_not_count() -> None:
    """Two misses of six visits, of which the first is in the warm-up."""
    simulated = simulate(alternating(6), ON_DEMAND, warm_up_tokens=1)
    assert simulated.hit_rate == pytest.approx(4 / 5)
    assert simulated.transfer_bytes == pytest.approx(EXPERT_BYTES / 5)
    assert simulated.tpot_seconds == pytest.approx(1.5 + 0.1 / 5)


def test_computation_of_one_expert_goes_on_while_another_one_comes() -> None:
    """Of two missing experts the second one comes while the first one is computed."""
    simulated = simulate([token([[0, 1]])], ON_DEMAND)
    assert simulated.wait_seconds == pytest.approx(0.1)
    assert simulated.tpot_seconds == pytest.approx(1.0 + 0.1 + 0.5 + 0.5)


@pytest.mark.parametrize(("seconds", "waited"), [(0.1, 0.0), (1.5, 0.5)], ids=["hidden", "longer than the computation"])
def test_a_guess_is_moved_behind_the_demand_while_the_layer_is_computed(seconds: float, waited: float) -> None:
    """Each token misses in both layers. The second one's expert comes during 0.5 s for the first one's and the pass's
    0.5 s until the second layer."""
    text = [token([[n % 2], [n % 2]], guesses=[[[n % 2]], []]) for n in range(4)]
    hardware = HARDWARE._replace(bandwidth=EXPERT_BYTES / seconds)
    decoding = ON_DEMAND._replace(policy="lookahead")
    blind = simulate(text, decoding, hardware=hardware, experts_per_layer=(2, 2))
    assert blind.wait_seconds == pytest.approx(2 * seconds)
    guessing = simulate(text, decoding._replace(has_guesses=True), hardware=hardware, experts_per_layer=(2, 2))
    assert guessing.wait_seconds == pytest.approx(seconds + waited)
    assert guessing.tpot_seconds == pytest.approx(1.0 + 2 * 0.5 + seconds + waited)
    assert guessing.transfer_bytes == 2 * EXPERT_BYTES
    assert guessing.link_load == pytest.approx(2 * seconds / guessing.tpot_seconds)


def test_experts_of_a_draft_come_while_it_goes_on() -> None:
    """Both experts are planned after the second of three draft passes, the first one after the first."""
    drafting = ON_DEMAND._replace(policy="lookahead", control=FixedLength(2))
    simulated = simulate(alternating(3), drafting)
    assert simulated.wait_seconds == 0.0
    assert simulated.tpot_seconds == pytest.approx((3 * 0.25 + 1.0 + 2 * 0.5) / 3)
    assert simulated.hit_rate == 1.0


def test_what_the_draft_did_not_foresee_is_waited_for() -> None:
    text = [token([[1]], draft_routes=[[0]]) for _ in range(3)]
    simulated = simulate(text, ON_DEMAND._replace(policy="lookahead", control=FixedLength(2)))
    assert simulated.wait_seconds == pytest.approx(0.1 / 3)
    assert simulated.transfer_bytes == pytest.approx(2 * EXPERT_BYTES / 3)


def test_a_cycle_yields_the_leading_accepted_tokens_and_one_more() -> None:
    """Cycles of 3, 1, 2 and 3 tokens."""
    is_drafted = [False, True, True, False, False, True, False, True, True]
    text = [token([[0]], is_drafted=drafted) for drafted in is_drafted]
    simulated = simulate(text, ON_DEMAND._replace(control=FixedLength(2)))
    assert simulated.tokens_per_cycle == 9 / 4
    assert simulated.draft_length == 2.0
    # A draft of two takes three passes, the last one for the routes of the second token.
    assert simulated.tpot_seconds == pytest.approx(4 * (3 * 0.25 + 1.0 + 0.5) / 9)


def test_a_draft_ends_with_the_text() -> None:
    simulated = simulate([token([[0]])] * 3, ON_DEMAND._replace(control=FixedLength(8)))
    assert (simulated.tokens_per_cycle, simulated.draft_length) == (3.0, 2.0)


def test_a_draft_of_no_tokens_costs_nothing() -> None:
    drafting = simulate(alternating(6), ON_DEMAND._replace(control=FixedLength(0)))
    assert drafting == simulate(alternating(6), ON_DEMAND)
