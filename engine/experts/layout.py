"""Which expert is where: an expert is one flat record of bytes, so that moving it is one copy."""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import msgspec
import torch

from engine.direct_io import BLOCK_BYTES
from engine.dtypes import dtype_name, torch_dtype

TENSOR_ALIGNMENT_BYTES = 64


class ExpertId(NamedTuple):
    layer: int
    """Index among the model's mixture-of-experts layers, in order of execution."""
    expert: int


class TensorSpec(msgspec.Struct, frozen=True):
    """One weight of an expert inside its record."""

    name: str
    """The parameter's name in the experts module: `gate_up_proj`, `down_proj`, `down_proj_bias`, ..."""
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.torch_dtype.itemsize


class LayerLayout(msgspec.Struct, frozen=True):
    num_experts: int
    is_transposed: bool
    """Whether the matrices are [in, out] rather than [out, in]."""
    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, parameters: dict[str, torch.Tensor], is_transposed: bool) -> "LayerLayout":
        """Layout of a layer whose fused parameters are `[num_experts, ...]` each."""
        offset = 0
        specs = []
        for name, parameter in parameters.items():
            spec = TensorSpec(name, tuple(parameter.shape[1:]), dtype_name(parameter.dtype), offset)
            specs.append(spec)
            offset = _round_up(offset + spec.num_bytes, TENSOR_ALIGNMENT_BYTES)
        (num_experts,) = {parameter.shape[0] for parameter in parameters.values()}
        return cls(num_experts, is_transposed, tuple(specs))

    @property
    def matrix_shapes(self) -> dict[str, torch.Size]:
        """[out, in] of the projections by name; what else an expert has are biases."""
        return {
            spec.name: torch.Size(reversed(spec.shape) if self.is_transposed else spec.shape)
            for spec in self.tensors
            if not spec.name.endswith("_bias")
        }

    @property
    def num_bytes(self) -> int:
        return max(spec.offset + spec.num_bytes for spec in self.tensors)


class ExpertLayout(msgspec.Struct, frozen=True):
    """Layout of all experts of a model; records of smaller layers are padded to the size of the largest."""

    layers: tuple[LayerLayout, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the experts' weights."""
        return self.layers[0].tensors[0].torch_dtype

    @property
    def expert_bytes(self) -> int:
        return _round_up(max(layer.num_bytes for layer in self.layers), BLOCK_BYTES)

    @property
    def num_experts(self) -> int:
        """Experts of all layers together."""
        return sum(layer.num_experts for layer in self.layers)

    def record_index(self, expert: ExpertId) -> int:
        """The place of the expert's record among those of all experts."""
        return sum(layer.num_experts for layer in self.layers[: expert.layer]) + expert.expert

    def experts(self) -> Iterator[ExpertId]:
        """All experts, in the order of their records."""
        for index, layer in enumerate(self.layers):
            for expert in range(layer.num_experts):
                yield ExpertId(index, expert)

    def views(self, layer: int, record: torch.Tensor) -> dict[str, torch.Tensor]:
        """The weights inside a record (uint8 [expert_bytes]), as views of it."""
        return {
            spec.name: record[spec.offset : spec.offset + spec.num_bytes].view(spec.torch_dtype).view(spec.shape)
            for spec in self.layers[layer].tensors
        }


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
