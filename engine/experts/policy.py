"""Which resident expert to give up for another one, where no plan needs any of them.

Experts are counted through all layers, in the order of `ExpertLayout.experts()`, so that choosing among thousands is a
handful of array operations.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.config import CachePolicyName
from engine.experts.layout import ExpertId

Mask = npt.NDArray[np.bool_]


class ExpertIndex:
    """Numbers experts through all layers."""

    def __init__(self, experts_per_layer: Sequence[int]) -> None:
        self._first = [0, *accumulate(experts_per_layer)]
        self._ids = [
            ExpertId(layer, expert) for layer, count in enumerate(experts_per_layer) for expert in range(count)
        ]

    @property
    def num_layers(self) -> int:
        return len(self._first) - 1

    @property
    def num_experts(self) -> int:
        return len(self._ids)

    def number(self, expert: ExpertId) -> int:
        return self._first[expert.layer] + expert.expert

    def expert(self, number: int) -> ExpertId:
        return self._ids[number]

    def layer(self, layer: int) -> slice:
        """The numbers of a layer's experts."""
        return slice(self._first[layer], self._first[layer + 1])


class EvictionPolicy(Protocol):
    """Remembers how experts were used. Mutated only by `TransferSchedule`, which tells it of every change."""

    def insert(self, expert: ExpertId) -> None:
        """The expert got a slot."""

    def remove(self, expert: ExpertId) -> None:
        """The expert lost its slot."""

    def visit(self, layer: int, rows: Mapping[int, Sequence[int]], num_tokens: int) -> None:
        """A pass over so many tokens uses these experts of the layer, resident or not, each for those at `rows`."""

    def victim(self, layer: int, evictable: Mask) -> ExpertId | None:
        """The expert to evict for one of `layer`; `evictable` [num_experts] may be. None where none is."""


class PerLayerLru:
    """Least recently used within the layer that needs the slot; each layer has an even share of the slots.

    The baseline of Mixtral-Offloading (Eliseev and Mazur 2023), with slots that are global: a layer below its share, or
    one that has nothing to give up, takes from the layer that holds most.
    """

    def __init__(self, index: ExpertIndex, num_slots: int) -> None:
        self._index = index
        self._share = max(1, num_slots // index.num_layers)
        self._num_resident = [0] * index.num_layers
        self._last_use = np.zeros(index.num_experts, np.int64)
        self._now = 0

    def insert(self, expert: ExpertId) -> None:
        self._num_resident[expert.layer] += 1
        self._touch(expert)

    def remove(self, expert: ExpertId) -> None:
        self._num_resident[expert.layer] -= 1

    def visit(self, layer: int, rows: Mapping[int, Sequence[int]], num_tokens: int) -> None:
        for expert in rows:
            self._touch(ExpertId(layer, expert))

    def victim(self, layer: int, evictable: Mask) -> ExpertId | None:
        by_size = sorted(range(self._index.num_layers), key=self._num_resident.__getitem__, reverse=True)
        is_full = self._num_resident[layer] >= self._share
        for candidate in [layer, *by_size] if is_full else by_size:
            numbers = self._index.layer(candidate)
            if evictable[numbers].any():
                return ExpertId(candidate, _least(self._last_use[numbers], evictable[numbers]))
        return None

    def _touch(self, expert: ExpertId) -> None:
        self._now += 1
        self._last_use[self._index.number(expert)] = self._now


class DecayedFrequency:
    """Least used of late, in whatever layer: uses are counted per token and fade, of resident experts and others.

    Layers are visited in a circle, where recency over all of them says little: the least recently used expert is one of
    those that are needed next. How often a layer takes an expert says more, and decides between layers too.
    """

    DECAY = 0.9
    """What is left of a use after one more token of the layer.

    On recorded routes 0.9 is as good as 0.95 over long replies, and better in the first tokens behind a prompt.
    """

    def __init__(self, index: ExpertIndex) -> None:
        self._index = index
        self._score = np.zeros(index.num_experts)

    def insert(self, expert: ExpertId) -> None:
        pass

    def remove(self, expert: ExpertId) -> None:
        pass

    def visit(self, layer: int, rows: Mapping[int, Sequence[int]], num_tokens: int) -> None:
        scores = self._score[self._index.layer(layer)]
        scores *= self.DECAY**num_tokens
        for expert, positions in rows.items():
            scores[expert] += (self.DECAY ** (num_tokens - 1 - np.asarray(positions))).sum()

    def victim(self, layer: int, evictable: Mask) -> ExpertId | None:
        if not evictable.any():
            return None
        return self._index.expert(_least(self._score, evictable))


def _least(values: npt.NDArray[np.generic], mask: Mask) -> int:
    """Where the least of the values is that the mask has, which must have some."""
    numbers = np.flatnonzero(mask)
    return int(numbers[values[numbers].argmin()])


def eviction_policy(name: CachePolicyName, index: ExpertIndex, num_slots: int) -> EvictionPolicy:
    return PerLayerLru(index, num_slots) if name == "lru" else DecayedFrequency(index)
