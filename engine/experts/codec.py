"""What the bytes of a record mean."""

from math import prod
from typing import Protocol

import torch

from engine.experts.layout import ExpertLayout


class Codec(Protocol):
    """Turns an expert's record, as it lies in a slot, into weights to compute with."""

    def decode(self, layer: int, record: torch.Tensor) -> dict[str, torch.Tensor]:
        """Weights by parameter name, from a record uint8 [expert_bytes] on the device.

        The tensors are valid until the next call, and only while the record is; they must not be written to.
        """


class IdentityCodec:
    """The record holds the checkpoint's own bytes. Where compute is of another type, weights are converted on use into
    one set of buffers, so that a slot costs no more than the checkpoint's bytes."""

    def __init__(self, layout: ExpertLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self._buffers = {
            (name, shape): torch.empty(shape, dtype=dtype, device=device)
            for name, shape in _converted_weights(layout, dtype)
        }

    @staticmethod
    def buffer_bytes(layout: ExpertLayout, dtype: torch.dtype) -> int:
        """Device memory of the conversion buffers."""
        return dtype.itemsize * sum(prod(shape) for _, shape in _converted_weights(layout, dtype))

    def decode(self, layer: int, record: torch.Tensor) -> dict[str, torch.Tensor]:
        weights = self._layout.views(layer, record)
        for name, weight in weights.items():
            buffer = self._buffers.get((name, tuple(weight.shape)))
            if buffer is not None:
                weights[name] = buffer.copy_(weight)
        return weights


def _converted_weights(layout: ExpertLayout, dtype: torch.dtype) -> set[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the weights that are not of type `dtype`."""
    return {
        (spec.name, spec.shape) for layer in layout.layers for spec in layer.tensors if spec.torch_dtype is not dtype
    }
