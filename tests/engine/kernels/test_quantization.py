import pytest
import torch
from optimum.quanto import AbsmaxOptimizer, MaxOptimizer, qint4, quantize_weight
from optimum.quanto.tensor import WeightQBitsTensor
from optimum.quanto.tensor.packed import PackedTensor

from engine.config import DraftWeights
from engine.errors import ConfigError
from engine.kernels.quantization import (
    QTYPES,
    QuantizationSpec,
    QuantizedStack,
    dequantize,
    quantize,
    require_fitting,
    stack_bytes,
    unpack,
    unpack_integers,
)

GROUPED: list[DraftWeights] = ["qint2", "qint4"]
BY_ROW: list[DraftWeights] = ["qint8", "qfloat8"]
SHAPE = torch.Size((48, 96))


def matrices(num_experts: int = 3, shape: torch.Size = SHAPE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[E, out, in], with a row of zeros and one of a single value."""
    weights = torch.randn(num_experts, *shape, generator=torch.Generator().manual_seed(0))
    weights[0, 1] = 0.0
    weights[0, 2] = 0.25
    return weights.to(dtype)


def quantos_own(matrix: torch.Tensor, spec: QuantizationSpec) -> torch.Tensor:
    """What quanto makes of the matrix in its own tensor classes, but for rows of zeros, of which it makes NaN."""
    qtype = QTYPES[spec.weights]
    if spec.is_grouped:
        scale, shift = MaxOptimizer()(matrix, qtype, 0, spec.group_size)
        weight = quantize_weight(
            matrix, qtype=qtype, axis=0, scale=scale, shift=shift, group_size=spec.group_size, optimized=False
        )
    else:
        scale = AbsmaxOptimizer()(matrix, qtype, 0)
        weight = quantize_weight(matrix, qtype=qtype, axis=0, scale=scale, optimized=False)
    dequantized: torch.Tensor = weight.dequantize().nan_to_num(0.0)
    return dequantized


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [*GROUPED, *BY_ROW])
def test_dequantized_is_bit_for_bit_what_quanto_says(weights: DraftWeights, dtype: torch.dtype) -> None:
    spec = QuantizationSpec(weights, 32)
    experts = matrices(dtype=dtype)
    stack = quantize(experts, spec)
    for expert, matrix in enumerate(experts):
        dequantized = dequantize(stack, expert, spec, SHAPE)
        assert dequantized.dtype is dtype
        assert torch.equal(dequantized, quantos_own(matrix, spec))
        assert not dequantized.isnan().any()


@pytest.mark.parametrize(
    ("weights", "largest_error"), [("qint2", 0.6), ("qint4", 0.12), ("qint8", 0.008), ("qfloat8", 0.07)]
)
def test_the_error_is_what_so_many_bits_allow(weights: DraftWeights, largest_error: float) -> None:
    spec = QuantizationSpec(weights, 32)
    experts = matrices()
    stack = quantize(experts, spec)
    errors = [(dequantize(stack, e, spec, SHAPE) - m).abs().max() / m.abs().max() for e, m in enumerate(experts)]
    assert largest_error / 4 < max(errors) < largest_error


def test_a_row_is_quantized_by_itself() -> None:
    spec = QuantizationSpec("qint4", 32)
    stack = quantize(matrices(), spec)
    assert torch.equal(dequantize(stack, 0, spec, SHAPE)[1], torch.zeros(SHAPE[1]))
    loud = matrices()
    loud[0, 3] *= 1000
    changed = dequantize(quantize(loud, spec), 0, spec, SHAPE)
    unchanged = dequantize(stack, 0, spec, SHAPE)
    others = [row for row in range(SHAPE[0]) if row != 3]
    assert torch.equal(changed[others], unchanged[others])


@pytest.mark.parametrize(("weights", "bits"), [("qint2", 2), ("qint4", 4), ("qint8", 8), ("qfloat8", 8)])
def test_data_takes_so_many_bits_per_weight(weights: DraftWeights, bits: int) -> None:
    spec = QuantizationSpec(weights, 32)
    stack = quantize(matrices(), spec)
    assert stack.data.nbytes == 3 * SHAPE.numel() * bits // 8
    if spec.is_grouped:
        assert stack.scale.shape == stack.shift.shape == (3, SHAPE[0], SHAPE[1] // 32, 1)
    else:
        assert stack.scale.shape == (3, SHAPE[0], 1)
        assert stack.shift.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128])
@pytest.mark.parametrize("shape", [(16, 128), (48, 256), (4, 128), (128, 384), (36, 640)])
@pytest.mark.parametrize("weights", [*GROUPED, *BY_ROW])
def test_the_bytes_of_a_stack_are_known_beforehand(
    weights: DraftWeights, shape: tuple[int, int], group_size: int, dtype: torch.dtype
) -> None:
    spec = QuantizationSpec(weights, group_size)
    require_fitting(spec, [torch.Size(shape)])
    stack = quantize(matrices(shape=torch.Size(shape), dtype=dtype), spec)
    assert stack_bytes(spec, 3, torch.Size(shape), dtype) == sum(tensor.nbytes for tensor in stack)


@pytest.mark.parametrize("weights", BY_ROW)
def test_the_bytes_of_odd_matrices_are_known_too(weights: DraftWeights) -> None:
    spec, shape = QuantizationSpec(weights, 64), torch.Size((5, 7))
    stack = quantize(matrices(shape=shape), spec)
    assert stack_bytes(spec, 3, shape, torch.float32) == sum(tensor.nbytes for tensor in stack)


@pytest.mark.parametrize("weights", [*GROUPED, *BY_ROW])
def test_matrices_are_quantized_one_by_one(weights: DraftWeights) -> None:
    spec = QuantizationSpec(weights, 32)
    experts = matrices(dtype=torch.bfloat16)
    together = quantize(experts, spec)
    for expert, matrix in enumerate(experts):
        for alone, part in zip(quantize(iter([matrix]), spec), together, strict=True):
            assert alone.dtype is part.dtype
            assert torch.equal(alone.float(), part[expert : expert + 1].float())


@pytest.mark.parametrize("weights", GROUPED)
def test_scale_and_shift_turn_the_unpacked_integers_into_weights(weights: DraftWeights) -> None:
    spec = QuantizationSpec(weights, 16)
    stack = quantize(matrices(), spec)
    for expert in range(3):
        integers = unpack(stack.data[expert], spec, SHAPE)
        assert integers.dtype is torch.uint8
        assert integers.shape == SHAPE
        assert int(integers.max()) == 2**spec.bits - 1
        grouped = integers.view(SHAPE[0], -1, 16).float()
        weight = (grouped * stack.scale[expert] - stack.shift[expert]).view(SHAPE)
        torch.testing.assert_close(weight, dequantize(stack, expert, spec, SHAPE))


def test_the_packed_data_is_quantos_own() -> None:
    spec = QuantizationSpec("qint4", 32)
    matrix = matrices()[0]
    scale, shift = MaxOptimizer()(matrix, qint4, 0, 32)
    weight = quantize_weight(matrix, qtype=qint4, axis=0, scale=scale, shift=shift, group_size=32, optimized=False)
    assert isinstance(weight, WeightQBitsTensor)
    stack = quantize(matrices(), spec)
    assert torch.equal(stack.data[0], weight._data._data.flatten())


@pytest.mark.parametrize("weights", GROUPED)
@pytest.mark.parametrize(
    ("num_columns", "group_size", "advice"),
    [(96, 64, "such as 32"), (256, 96, "such as 128"), (80, 32, "such as 16"), (40, 16, r"choose one that does\.")],
)
def test_a_group_size_that_does_not_divide_the_rows_is_refused(
    weights: DraftWeights, num_columns: int, group_size: int, advice: str
) -> None:
    shapes = [torch.Size((8, num_columns))]
    with pytest.raises(ConfigError, match=rf"draft_group_size {group_size} .* rows of {num_columns} .*{advice}"):
        require_fitting(QuantizationSpec(weights, group_size), shapes)


@pytest.mark.parametrize(("num_columns", "group_size", "advised"), [(96, 64, 32), (256, 96, 128), (80, 32, 16)])
def test_the_advised_group_size_works(num_columns: int, group_size: int, advised: int) -> None:
    shape = torch.Size((8, num_columns))
    with pytest.raises(ConfigError, match=f"such as {advised}"):
        require_fitting(QuantizationSpec("qint4", group_size), [shape])
    require_fitting(QuantizationSpec("qint4", advised), [shape])
    assert isinstance(quantize(matrices(shape=shape), QuantizationSpec("qint4", advised)), QuantizedStack)


def test_one_matrix_that_does_not_fit_is_enough() -> None:
    spec = QuantizationSpec("qint4", 64)
    fitting, other = torch.Size((8, 128)), torch.Size((128, 96))
    require_fitting(spec, [fitting, fitting])
    with pytest.raises(ConfigError, match="rows of 96"):
        require_fitting(spec, [fitting, other, fitting])


@pytest.mark.parametrize("weights", BY_ROW)
def test_types_with_a_scale_per_row_have_no_groups(weights: DraftWeights) -> None:
    experts = matrices(shape=torch.Size((8, 33)))
    require_fitting(QuantizationSpec(weights, 64), [torch.Size((8, 33))])
    stack = quantize(experts, QuantizationSpec(weights, 64))
    assert torch.equal(stack.scale, quantize(experts, QuantizationSpec(weights, 7)).scale)


def test_a_spec_is_named_by_what_matters_for_it() -> None:
    assert str(QuantizationSpec("qint4", 64)) == "qint4-g64"
    assert str(QuantizationSpec("qint2", 32)) == "qint2-g32"
    assert str(QuantizationSpec("qint8", 64)) == "qint8"
    assert str(QuantizationSpec("qfloat8", 32)) == "qfloat8"


@pytest.mark.parametrize("bits", [2, 4])
def test_unpacking_undoes_packing(bits: int) -> None:
    integers = torch.randint(0, 2**bits, (64, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = PackedTensor.pack(integers, bits)
    assert torch.equal(unpack_integers(packed._data, bits), integers)


@pytest.mark.parametrize(("weights", "num_rows"), [("qint4", 7), ("qint2", 6)])
def test_groups_that_do_not_fill_their_bytes_are_refused(weights: DraftWeights, num_rows: int) -> None:
    shape = torch.Size((num_rows, 64))
    with pytest.raises(ConfigError, match=rf"{weights} cannot pack .* {num_rows} x 64 in groups of 64"):
        require_fitting(QuantizationSpec(weights, 64), [shape])
    require_fitting(QuantizationSpec(weights, 16), [shape])
    require_fitting(QuantizationSpec("qint8", 64), [shape])
