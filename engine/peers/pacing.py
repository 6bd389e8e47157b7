"""A slower link than the machine has: weights that take their time to be read."""

import mmap
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from torch import nn


class PacedWeights(Mapping[str, torch.Tensor]):
    """Tensors by name, each of which takes at least its bytes, as stored, over `bytes_per_second` to be read.

    A copy to a GPU that whoever asks makes of it comes on top.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        bytes_per_second: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._weights = weights
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep

    def __getitem__(self, name: str) -> torch.Tensor:
        started = self._clock()
        tensor = self._weights[name]
        # What is mapped from a file is read only when it is used, which must not take time again after the wait.
        tensor.flatten()[:: max(1, mmap.PAGESIZE // tensor.element_size())].clone()
        remaining = tensor.nbytes / self._bytes_per_second - (self._clock() - started)
        if remaining > 0:
            self._sleep(remaining)
        return tensor

    def __contains__(self, name: object) -> bool:
        # A mapping's default would read the tensor, and wait for it.
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def pace(model: nn.Module, bytes_per_second: float) -> None:
    """Let all weights that accelerate's hooks load take their time."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for align in hook.hooks if isinstance(hook, SequentialHook) else [hook]:
            if isinstance(align, AlignDevicesHook) and align.offload:
                align.weights_map = PacedWeights(align.weights_map, bytes_per_second)
