"""Which planned experts give way: as few as possible, and never one before what takes its slot."""

from itertools import groupby
from typing import NamedTuple

import torch
from hypothesis import event, given
from hypothesis import strategies as st

from engine.device import DONE
from engine.experts.cache import ExpertCache
from engine.experts.layout import ExpertId
from engine.experts.planner import plan_transfers
from engine.experts.policy import DecayedFrequency, ExpertIndex
from engine.experts.schedule import TransferSchedule

NUM_LAYERS, NUM_EXPERTS, EXPERT_BYTES = 4, 5, 4
INDEX = ExpertIndex([NUM_EXPERTS] * NUM_LAYERS)
EVERYTHING = [INDEX.expert(number) for number in range(INDEX.num_experts)]


class Situation(NamedTuple):
    predicted: list[ExpertId]
    resident: list[ExpertId]
    num_slots: int

    @property
    def layers(self) -> list[list[ExpertId]]:
        return [list(experts) for _, experts in groupby(self.predicted, key=lambda expert: expert.layer)]

    @property
    def num_spare(self) -> int:
        return self.num_slots - sum(expert in self.predicted for expert in self.resident)


@st.composite
def situations(draw: st.DrawFn, every_layer_fits: bool) -> Situation:
    """Slots that are mostly full, of what is predicted above all."""
    experts = st.lists(st.integers(0, NUM_EXPERTS - 1), unique=True)
    predicted = [ExpertId(layer, e) for layer in range(NUM_LAYERS) for e in draw(experts)]
    least = max((len(group) for group in Situation(predicted, [], 0).layers), default=1) if every_layer_fits else 1
    num_slots = draw(st.integers(least, least + 5))
    others = [expert for expert in EVERYTHING if expert not in predicted]
    # The first choice is what is drawn most: the last layers, which may have to give way to the first.
    candidates = [*reversed(predicted), *others]
    num_resident = min(num_slots, draw(st.integers(0, num_slots + 3)))
    places = draw(st.lists(st.integers(0, len(candidates) - 1), unique=True, max_size=num_resident))
    rest = [place for place in range(len(candidates)) if place not in places]
    resident = [candidates[place] for place in [*places, *rest][:num_resident]]
    return Situation(predicted, resident, num_slots)


def belady(situation: Situation) -> tuple[int, int]:
    """Moves of the optimum for visits to whole layers, and how often it gives up what is still to be visited.

    A layer's missing experts replace those that are visited last of all others, if ever (Belady 1966).
    """
    resident = set(situation.resident)
    next_visit = {expert: rank for rank, expert in enumerate(situation.predicted)}
    never = len(next_visit)
    num_moves = num_given_up = 0
    for experts in situation.layers:
        for expert in experts:
            if expert in resident:
                continue
            num_moves += 1
            if len(resident) == situation.num_slots:
                victim = max(resident - set(experts), key=lambda other: next_visit.get(other, never))
                num_given_up += victim in next_visit
                resident.remove(victim)
            resident.add(expert)
        for expert in experts:
            del next_visit[expert]
    return num_moves, num_given_up


def plan_of(situation: Situation) -> tuple[dict[ExpertId, int], list[ExpertId]]:
    return plan_transfers(
        situation.predicted, situation.resident.__contains__, situation.num_slots, situation.num_spare
    )


@given(situations(every_layer_fits=False))
def test_a_plan_ranks_what_is_predicted_and_gives_up_what_is_resident_from_behind(situation: Situation) -> None:
    ranks, expendable = plan_of(situation)
    assert list(ranks) == situation.predicted
    assert list(ranks.values()) == list(range(len(situation.predicted)))
    resident = [expert for expert in situation.predicted if expert in situation.resident]
    assert expendable == list(reversed(resident))[: len(expendable)]
    missing = [expert for expert in situation.predicted if expert not in situation.resident]
    # For what a layer has no room for, none of the same layer makes room.
    assert all(expert.layer > missing[0].layer for expert in expendable)


@given(situations(every_layer_fits=True))
def test_as_few_as_possible_are_given_up(situation: Situation) -> None:
    _, expendable = plan_of(situation)
    _, num_given_up = belady(situation)
    event(f"{num_given_up} given up")
    assert len(expendable) == num_given_up


def test_nothing_is_given_up_for_nothing() -> None:
    everything = [ExpertId(layer, expert) for layer in range(2) for expert in range(2)]
    assert plan_transfers(everything, everything.__contains__, 4, 0).expendable == []
    assert plan_transfers([], everything.__contains__, 4, 4).expendable == []
    # Two are missing, and two slots hold nothing that is predicted.
    assert plan_transfers(everything, everything[2:].__contains__, 4, 2).expendable == []
    # Without these, the last layer's two make room for the first one's, and come again when that has been visited.
    assert plan_transfers(everything, everything[2:].__contains__, 2, 0).expendable == [(1, 1), (1, 0)]


def schedule_with(situation: Situation) -> TransferSchedule:
    """Whatever the situation says is resident, and nothing else."""
    slab = torch.zeros(situation.num_slots, EXPERT_BYTES, dtype=torch.uint8)
    cache = ExpertCache(slab, INDEX)
    for expert in situation.resident:
        cache.fill(cache.reserve(expert, is_prefetch=False), [DONE])
    return TransferSchedule(cache, DecayedFrequency(INDEX), INDEX, lambda expert: EXPERT_BYTES)


class Run(NamedTuple):
    moves: list[list[ExpertId]]
    """What was moved before each visit, and after the last."""
    num_misses: int


def run(situation: Situation) -> Run:
    """Plan, and visit what is predicted, over a link that moves all that it can before each visit."""
    schedule = schedule_with(situation)
    cache, ranks = schedule.cache, {expert: rank for rank, expert in enumerate(situation.predicted)}
    schedule.plan(situation.predicted)
    visited: set[ExpertId] = set()

    def drain() -> list[ExpertId]:
        moved: list[ExpertId] = []
        while True:
            before = {expert for expert in EVERYTHING if expert in cache}
            piece = schedule.begin_piece()
            if piece is None:
                return moved
            expert = piece.transfer.expert
            for victim in before - {expert for expert in EVERYTHING if expert in cache}:
                if victim in ranks and victim not in visited:
                    assert ranks[victim] > ranks[expert], "given up for what is visited later"
            schedule.end_piece(piece, DONE)
            moved.append(expert)

    moves = []
    for experts in situation.layers:
        moves.append(drain())
        visited.update(experts)
        schedule.begin_visit(experts[0].layer, {expert.expert: [0] for expert in experts}, 1)
        while (slot := schedule.next_arrival()) is not None or schedule.is_waiting:
            if slot is not None:
                schedule.end_use(slot, DONE)
                continue
            piece = schedule.begin_piece()
            assert piece is not None, "the visit would wait for ever"
            schedule.end_piece(piece, DONE)
        schedule.end_visit()
    moves.append(drain())
    cache.check_integrity()
    return Run(moves, schedule.num_misses)


@given(situations(every_layer_fits=True))
def test_a_fast_link_moves_as_little_as_the_optimum_and_is_never_waited_for(situation: Situation) -> None:
    moves, num_misses = run(situation)
    assert num_misses == 0
    assert sum(map(len, moves)) == belady(situation)[0]


@given(situations(every_layer_fits=True))
def test_between_two_visits_transfers_come_by_their_deadlines(situation: Situation) -> None:
    ranks = {expert: rank for rank, expert in enumerate(situation.predicted)}
    for moved in run(situation).moves:
        assert [ranks[expert] for expert in moved] == sorted(ranks[expert] for expert in moved)


@given(situations(every_layer_fits=False))
def test_whatever_the_slots_nothing_is_given_up_for_what_is_visited_later(situation: Situation) -> None:
    run(situation)  # which checks it for each transfer
