"""Quantizing expert weights with optimum-quanto, and the stacked form in which they are stored.

quanto quantizes whole `nn.Linear` modules, but transformers keeps experts as fused 3-D parameters, which
`quanto.quantize(model)` leaves as they are. So each expert's matrix goes through quanto's tensor API by itself.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from optimum.quanto import AbsmaxOptimizer, MaxOptimizer, qfloat8, qint2, qint4, qint8, quantize_weight

from engine.config import DraftWeights
from engine.errors import ConfigError

QTYPES = {"qint2": qint2, "qint4": qint4, "qint8": qint8, "qfloat8": qfloat8}


class QuantizationSpec(NamedTuple):
    weights: DraftWeights
    group_size: int
    """Weights of a row that share a scale; the 8-bit types have one scale per row whatever this says."""

    @property
    def bits(self) -> int:
        return int(QTYPES[self.weights].bits)

    @property
    def is_grouped(self) -> bool:
        return self.bits < 8

    def __str__(self) -> str:
        return f"{self.weights}-g{self.group_size}" if self.is_grouped else self.weights


class QuantizedStack(NamedTuple):
    """The matrices of one layer's experts, `[E, out, in]`, in quanto's terms: `weight = scale * data - shift`."""

    data: torch.Tensor
    """qint4, qint2: uint8 [E, out * in * bits / 8], packed as quanto packs them; 8-bit types: [E, out, in]."""
    scale: torch.Tensor
    """[E, out, in / group_size, 1], or [E, out, 1]."""
    shift: torch.Tensor
    """As `scale`; empty for the symmetric 8-bit types."""


def require_fitting(spec: QuantizationSpec, shapes: Iterable[torch.Size]) -> None:
    """Raise `ConfigError` where the group size does not divide the rows of a matrix [out, in], or its groups do not
    fill the bytes that they are packed into."""
    for num_rows, num_columns in shapes if spec.is_grouped else ():
        if num_columns % spec.group_size:
            fitting = [size for size in (128, 64, 32, 16) if num_columns % size == 0]
            raise ConfigError(
                f"draft_group_size {spec.group_size} does not divide the experts' rows of {num_columns} weights; "
                f"choose one that does{f', such as {fitting[0]}' if fitting else ''}."
            )
        if num_rows * num_columns // spec.group_size % (8 // spec.bits):
            raise ConfigError(
                f"draft_weights {spec.weights} cannot pack matrices of {num_rows} x {num_columns} in groups "
                f"of {spec.group_size}; choose a smaller draft_group_size, or qint8."
            )


def stack_bytes(spec: QuantizationSpec, num_experts: int, shape: torch.Size, dtype: torch.dtype) -> int:
    """Bytes of a `QuantizedStack` of matrices [out, in] whose weights were of type `dtype`."""
    num_rows, num_columns = shape
    num_scales = num_rows * num_columns // spec.group_size if spec.is_grouped else num_rows
    parts_per_scale = 2 if spec.is_grouped else 1  # with its shift
    return num_experts * (shape.numel() * spec.bits // 8 + parts_per_scale * num_scales * dtype.itemsize)


def quantize(matrices: Iterable[torch.Tensor], spec: QuantizationSpec) -> QuantizedStack:
    """Quantize experts' matrices [out, in], one by one; their rows must fit the group size (`require_fitting`)."""
    parts = [_quantize_grouped(m, spec) if spec.is_grouped else _quantize_rows(m, spec) for m in matrices]
    return QuantizedStack(*(torch.stack(tensors) for tensors in zip(*parts, strict=True)))


def dequantize(stack: QuantizedStack, expert: int, spec: QuantizationSpec, shape: torch.Size) -> torch.Tensor:
    """One expert's matrix [out, in] = `shape`, bit for bit as quanto dequantizes it."""
    data, scale = stack.data[expert], stack.scale[expert]
    if not spec.is_grouped:
        return scale * data.to(scale.dtype)
    grouped = unpack(data, spec, shape).view(*scale.shape[:-1], spec.group_size)  # [out, in / group_size, group_size]
    return (scale * grouped - stack.shift[expert]).view(shape)


def unpack(data: torch.Tensor, spec: QuantizationSpec, shape: torch.Size) -> torch.Tensor:
    """The unsigned integers, uint8 [out, in] = `shape`, of one packed matrix of qint4 or qint2."""
    return unpack_integers(data.view(-1, spec.group_size), spec.bits).view(shape)


def unpack_integers(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """What `torch.ops.quanto.unpack` does, which would first compile an extension: a minute, and a compiler to have."""
    return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])


def _quantize_grouped(matrix: torch.Tensor, spec: QuantizationSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    qtype = QTYPES[spec.weights]
    scale, shift = MaxOptimizer()(matrix, qtype, 0, spec.group_size)
    weight = quantize_weight(
        matrix, qtype=qtype, axis=0, scale=scale, shift=shift, group_size=spec.group_size, optimized=False
    )
    grouped = (matrix.shape[0], matrix.shape[1] // spec.group_size, 1)
    return weight._data._data.flatten(), scale.view(grouped), shift.view(grouped)


def _quantize_rows(matrix: torch.Tensor, spec: QuantizationSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    qtype = QTYPES[spec.weights]
    scale = AbsmaxOptimizer()(matrix, qtype, 0)
    scale = torch.where(scale == 0, 1, scale)  # a row of zeros: 0 / 0 would make it NaN in qfloat8
    weight = quantize_weight(matrix, qtype=qtype, axis=0, scale=scale, optimized=False)
    return weight._data, scale, scale.new_empty(0)
