"""How much better than the cache's policies one could be that knows the future: hit rates on a recorded trace.

    python -m benchmarks.eviction [--model NAME] [--profile FILE] [--json FILE]

A visit is one layer of one token, whose experts must be resident together. Nothing is prefetched, so that each expert's
first visit is a miss for everybody. Belady's rule (1966) evicts what is needed last, and no rule has fewer misses.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import recorded
from engine.config import CachePolicyName
from engine.errors import SpecterError
from engine.experts.layout import ExpertId
from engine.experts.policy import EvictionPolicy, ExpertIndex, eviction_policy
from engine.process import quiet_libraries
from engine.profile import ProfiledToken

POLICIES: tuple[CachePolicyName, ...] = ("lru", "lookahead")
OPTIMUM = "belady"
SLOT_SHARES = (0.1, 0.2, 0.35, 0.5, 0.75, 0.9)

Visit = Sequence[ExpertId]
"""Experts of one layer, all different."""


class Rule(Protocol):
    """Chooses what to evict. Mutable; told of everything that happens to the cache."""

    def visit(self, visit: Visit) -> None:
        """The next visit begins."""

    def insert(self, expert: ExpertId) -> None:
        """The expert got a slot."""

    def remove(self, expert: ExpertId) -> None:
        """The expert lost its slot."""

    def victim(self, layer: int, idle: set[ExpertId]) -> ExpertId:
        """One of the idle experts, of which there are some, to evict for one of the layer."""


class PolicyRule:
    """A policy of the engine's cache."""

    def __init__(self, policy: EvictionPolicy, index: ExpertIndex) -> None:
        self.insert = policy.insert
        self.remove = policy.remove
        self._policy = policy
        self._index = index

    def visit(self, visit: Visit) -> None:
        self._policy.visit(visit[0].layer, {expert.expert: [0] for expert in visit}, 1)

    def victim(self, layer: int, idle: set[ExpertId]) -> ExpertId:
        evictable = np.zeros(self._index.num_experts, np.bool_)
        evictable[[self._index.number(expert) for expert in idle]] = True
        victim = self._policy.victim(layer, evictable)
        assert victim is not None, "some expert is idle"
        return victim


class Belady:
    """Evicts the expert that is visited again last."""

    def __init__(self, visits: Sequence[Visit]) -> None:
        self._uses: dict[ExpertId, list[int]] = {}
        """The visits of each expert that are still to come, the next one at the end."""
        for time in reversed(range(len(visits))):
            for expert in visits[time]:
                self._uses.setdefault(expert, []).append(time)
        self._never = len(visits)

    def visit(self, visit: Visit) -> None:
        for expert in visit:
            self._uses[expert].pop()

    def insert(self, expert: ExpertId) -> None:
        pass

    def remove(self, expert: ExpertId) -> None:
        pass

    def victim(self, layer: int, idle: set[ExpertId]) -> ExpertId:
        return max(idle, key=lambda expert: (self._uses[expert] or [self._never])[-1])


def count_hits(visits: Sequence[Visit], num_slots: int, rule: Rule) -> int:
    """Experts that are resident when their visit begins; no visit may have more experts than there are slots."""
    resident: set[ExpertId] = set()
    num_hits = 0
    for visit in visits:
        rule.visit(visit)
        missing = [expert for expert in visit if expert not in resident]
        num_hits += len(visit) - len(missing)
        for expert in missing:
            if len(resident) == num_slots:
                victim = rule.victim(expert.layer, resident.difference(visit))
                resident.remove(victim)
                rule.remove(victim)
            resident.add(expert)
            rule.insert(expert)
    return num_hits


def hit_rates(visits: Sequence[Visit], experts_per_layer: Sequence[int], num_slots: int) -> dict[str, float]:
    """By policy, with the optimum's."""
    index = ExpertIndex(experts_per_layer)
    rules: dict[str, Rule] = {name: PolicyRule(eviction_policy(name, index, num_slots), index) for name in POLICIES}
    rules[OPTIMUM] = Belady(visits)
    num_visited = sum(map(len, visits))
    return {name: count_hits(visits, num_slots, rule) / num_visited for name, rule in rules.items()}


def visits_of(tokens: Sequence[ProfiledToken]) -> list[Visit]:
    """What decoding the text token by token visits."""
    return [
        [ExpertId(layer, expert) for expert in experts]
        for token in tokens
        for layer, experts in enumerate(token.routes)
    ]


def table_of(rates: Mapping[int, Mapping[str, float]], num_experts: int) -> Table:
    table = Table("slots", "of all", *POLICIES, OPTIMUM, "excess misses of lookahead")
    for num_slots, by_policy in rates.items():
        excess = (1 - by_policy["lookahead"]) / (1 - by_policy[OPTIMUM]) - 1
        shares = [f"{by_policy[name]:.1%}" for name in (*POLICIES, OPTIMUM)]
        table.add_row(f"{num_slots}", f"{num_slots / num_experts:.0%}", *shares, f"{excess:.0%}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    recorded.add_arguments(parser)
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    arguments = parser.parse_args()
    quiet_libraries()
    try:
        found = recorded.situation(arguments)
    except SpecterError as error:
        sys.exit(str(error))
    visits = visits_of(found.profile.tokens)
    experts_per_layer = [layer.num_experts for layer in found.model.sizes.layout.layers]
    num_experts, least = sum(experts_per_layer), max(map(len, visits))
    slots = [max(least, round(share * num_experts)) for share in SLOT_SHARES]
    rates = {num_slots: hit_rates(visits, experts_per_layer, num_slots) for num_slots in slots}
    Console().print(table_of(rates, num_experts))
    if arguments.json:
        rows = [{"num_slots": num_slots, **by_policy} for num_slots, by_policy in rates.items()]
        arguments.json.write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
