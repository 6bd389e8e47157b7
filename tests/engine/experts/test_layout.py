from collections.abc import Mapping
from math import prod

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.direct_io import BLOCK_BYTES
from engine.experts.layout import (
    TENSOR_ALIGNMENT_BYTES,
    ExpertId,
    ExpertLayout,
    LayerLayout,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
shapes = st.lists(st.integers(1, 40), min_size=1, max_size=2).map(tuple)
layers = st.dictionaries(
    st.sampled_from(["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"]),
    st.tuples(shapes, st.sampled_from(DTYPES)),
    min_size=1,
)


def layer_layout(num_experts: int, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> LayerLayout:
    parameters = {name: torch.empty(num_experts, *shape, dtype=dtype) for name, (shape, dtype) in tensors.items()}
    return LayerLayout.of(parameters, is_transposed=False)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits at all, NaN and infinities among them."""
    return torch.randint(0, 256, (prod(shape) * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> list[int]:
    flat: list[int] = tensor.contiguous().view(-1).view(torch.uint8).tolist()
    return flat


@given(st.lists(st.tuples(st.integers(1, 3), layers), min_size=1, max_size=3))
def test_tensors_and_records_are_aligned_and_do_not_overlap(
    specs: list[tuple[int, dict[str, tuple[tuple[int, ...], torch.dtype]]]],
) -> None:
    layout = ExpertLayout(tuple(layer_layout(*spec) for spec in specs))
    assert layout.expert_bytes % BLOCK_BYTES == 0
    assert max(layer.num_bytes for layer in layout.layers) <= layout.expert_bytes
    assert layout.expert_bytes - max(layer.num_bytes for layer in layout.layers) < BLOCK_BYTES
    for layer in layout.layers:
        end = 0
        for spec in layer.tensors:
            assert spec.offset % TENSOR_ALIGNMENT_BYTES == 0
            assert spec.offset >= end
            end = spec.offset + spec.num_bytes
        assert end == layer.num_bytes


@given(layers)
def test_views_give_back_every_bit_that_was_written_through_them(
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]],
) -> None:
    # A second layer makes the record larger than this one needs: what is written must stay in its own record.
    layout = ExpertLayout((layer_layout(1, tensors), layer_layout(1, {"up_proj": ((60, 60), torch.float32)})))
    slab = torch.zeros(3, layout.expert_bytes, dtype=torch.uint8)
    written = {name: random_bits(shape, dtype) for name, (shape, dtype) in tensors.items()}
    for name, view in layout.views(0, slab[1]).items():
        view.copy_(written[name])
    for name, view in layout.views(0, slab[1].clone()).items():
        assert view.dtype == written[name].dtype
        assert bits(view) == bits(written[name])
    assert not slab[0].any()
    assert not slab[2].any()
    assert not slab[1, layout.layers[0].num_bytes :].any()


def test_experts_come_layer_by_layer() -> None:
    tensors = {"up_proj": ((4, 4), torch.float32)}
    layout = ExpertLayout((layer_layout(2, tensors), layer_layout(3, tensors)))
    assert list(layout.experts()) == [ExpertId(0, 0), ExpertId(0, 1), ExpertId(1, 0), ExpertId(1, 1), ExpertId(1, 2)]
    assert layout.num_experts == 5


def test_layout_survives_json() -> None:
    parameters = {
        "down_proj": torch.empty(2, 3, 5, dtype=torch.bfloat16),
        "down_proj_bias": torch.empty(2, 5, dtype=torch.float32),
    }
    layout = ExpertLayout((LayerLayout.of(parameters, is_transposed=True),))
    decoded = msgspec.json.decode(msgspec.json.encode(layout), type=ExpertLayout)
    assert decoded == layout
    assert decoded.layers[0].is_transposed
    assert decoded.layers[0].tensors[0].shape == (3, 5)
    assert decoded.layers[0].tensors[0].torch_dtype is torch.bfloat16


def test_parameters_of_different_numbers_of_experts_are_no_layer() -> None:
    with pytest.raises(ValueError, match="unpack"):
        LayerLayout.of({"up_proj": torch.empty(2, 3, 3), "down_proj": torch.empty(3, 3, 3)}, is_transposed=False)
