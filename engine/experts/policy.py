"""Which resident expert to give up for another one."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from engine.experts.layout import ExpertId


class EvictionPolicy(Protocol):
    """Keeps an order over the experts in the cache. Mutated only by `ExpertCache`, which tells it of every change."""

    def insert(self, expert: ExpertId) -> None:
        """The expert got a slot."""

    def touch(self, expert: ExpertId) -> None:
        """The expert was used."""

    def remove(self, expert: ExpertId) -> None:
        """The expert lost its slot."""

    def victim(self, layer: int, evictable: Callable[[ExpertId], bool]) -> ExpertId | None:
        """An expert to evict for one of `layer`, among those for which `evictable` holds; None where there is none.

        Does not change the order: the cache calls `remove` when it evicts.
        """


class PerLayerLru:
    """Least recently used within the layer, which may hold its equal share of the slots.

    The baseline of Mixtral-Offloading (Eliseev and Mazur 2023), with slots that are global: a layer below its share, or
    one that has nothing to give up, takes from the layer that holds most.
    """

    def __init__(self, num_slots: int, num_layers: int) -> None:
        self._share = max(1, num_slots // num_layers)
        self._layers: list[OrderedDict[ExpertId, None]] = [OrderedDict() for _ in range(num_layers)]

    def insert(self, expert: ExpertId) -> None:
        self._layers[expert.layer][expert] = None

    def touch(self, expert: ExpertId) -> None:
        self._layers[expert.layer].move_to_end(expert)

    def remove(self, expert: ExpertId) -> None:
        del self._layers[expert.layer][expert]

    def victim(self, layer: int, evictable: Callable[[ExpertId], bool]) -> ExpertId | None:
        own = self._layers[layer]
        by_size = sorted(self._layers, key=len, reverse=True)
        for experts in [own, *by_size] if len(own) >= self._share else by_size:
            for expert in experts:
                if evictable(expert):
                    return expert
        return None
