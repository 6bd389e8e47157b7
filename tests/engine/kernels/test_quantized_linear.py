import pytest
import torch

from engine.config import DraftWeights
from engine.kernels.quantization import QuantizationSpec, QuantizedStack, dequantize, quantize
from engine.kernels.quantized_linear import (
    DequantizingLinear,
    Int4Linear,
    Int8Linear,
    QuantizedLinear,
    kernel_for,
    quantized_linear,
)

CPU = torch.device("cpu")
NUM_EXPERTS = 2


def stack_of(spec: QuantizationSpec, shape: torch.Size) -> QuantizedStack:
    return quantize(torch.randn(NUM_EXPERTS, *shape, generator=torch.Generator().manual_seed(0)), spec)


def worst_error(linear: QuantizedLinear, spec: QuantizationSpec, shape: torch.Size, num_rows: int) -> float:
    """Over all experts, against the product in float64 with the dequantized weights, relative to its largest terms."""
    stack = stack_of(spec, shape)
    inputs = torch.randn(num_rows, shape[1], generator=torch.Generator().manual_seed(num_rows))
    worst = 0.0
    for expert in range(NUM_EXPERTS):
        outputs = linear(expert, inputs)
        assert outputs.shape == (num_rows, shape[0])
        assert outputs.dtype is inputs.dtype
        weight = dequantize(stack, expert, spec, shape).double()
        terms = inputs.double().abs() @ weight.abs().T
        errors = (outputs.double() - inputs.double() @ weight.T).abs() / terms
        assert not errors.isnan().any()
        worst = max(worst, float(errors.max()))
    return worst


# Inputs, scales and outputs are rounded to bfloat16, each with a relative error of up to 2**-9; the output's is
# relative to the sum, which is at most the sum of the absolute terms.
BFLOAT16_TOLERANCE = 4 * 2**-9


@pytest.mark.parametrize("num_rows", range(1, 10))
@pytest.mark.parametrize(
    ("shape", "group_size"), [((16, 32), 32), ((48, 192), 64), ((80, 96), 32), ((32, 256), 128), ((16, 512), 256)]
)
def test_int4_kernel(shape: tuple[int, int], group_size: int, num_rows: int) -> None:
    spec = QuantizationSpec("qint4", group_size)
    linear = quantized_linear(stack_of(spec, torch.Size(shape)), spec, torch.Size(shape), CPU)
    assert isinstance(linear, Int4Linear)
    # The zero point is rounded by itself, so the error is relative to up to 16 steps instead of to the weight.
    assert worst_error(linear, spec, torch.Size(shape), num_rows) < 3 * BFLOAT16_TOLERANCE


@pytest.mark.parametrize("num_rows", range(1, 10))
@pytest.mark.parametrize("shape", [(16, 32), (48, 80), (5, 48), (7, 16)])
def test_int8_kernel(shape: tuple[int, int], num_rows: int) -> None:
    spec = QuantizationSpec("qint8", 64)
    linear = quantized_linear(stack_of(spec, torch.Size(shape)), spec, torch.Size(shape), CPU)
    assert isinstance(linear, Int8Linear)
    assert worst_error(linear, spec, torch.Size(shape), num_rows) < BFLOAT16_TOLERANCE


@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize("weights", ["qint2", "qint4", "qint8", "qfloat8"])
def test_dequantizing_reference(weights: DraftWeights, num_rows: int) -> None:
    spec = QuantizationSpec(weights, 32)
    shape = torch.Size((24, 96))
    linear = DequantizingLinear(stack_of(spec, shape), spec, shape)
    assert worst_error(linear, spec, shape, num_rows) < 1e-6


@pytest.mark.parametrize(
    ("weights", "group_size", "shape"),
    [
        ("qint2", 32, (32, 64)),
        ("qfloat8", 32, (32, 64)),
        ("qint4", 16, (32, 64)),
        ("qint4", 48, (32, 96)),
        ("qint4", 32, (24, 64)),
        ("qint8", 64, (32, 24)),
        ("qint8", 64, (5, 7)),
    ],
)
def test_what_no_kernel_supports_is_dequantized(weights: DraftWeights, group_size: int, shape: tuple[int, int]) -> None:
    spec = QuantizationSpec(weights, group_size)
    linear = quantized_linear(stack_of(spec, torch.Size(shape)), spec, torch.Size(shape), CPU)
    assert isinstance(linear, DequantizingLinear)
    assert worst_error(linear, spec, torch.Size(shape), 3) < 1e-6


def test_kernels_are_for_their_own_device_and_type() -> None:
    shape = torch.Size((32, 64))
    assert not Int4Linear.supports(QuantizationSpec("qint4", 32), shape, torch.device("cuda"))
    assert not Int8Linear.supports(QuantizationSpec("qint8", 32), shape, torch.device("cuda"))
    assert not Int4Linear.supports(QuantizationSpec("qint8", 32), shape, CPU)
    assert not Int8Linear.supports(QuantizationSpec("qint4", 32), shape, CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weights", ["qint2", "qint4", "qint8", "qfloat8"])
def test_outputs_have_the_type_of_the_inputs(weights: DraftWeights, dtype: torch.dtype) -> None:
    spec = QuantizationSpec(weights, 32)
    shape = torch.Size((32, 64))
    linear = quantized_linear(stack_of(spec, shape), spec, shape, CPU)
    outputs = linear(1, torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).to(dtype))
    assert outputs.dtype is dtype
    assert outputs.isfinite().all()


@pytest.mark.parametrize(
    ("weights", "bytes_per_weight"), [("qint2", 0.25), ("qint4", 0.5), ("qint8", 1.0), ("qfloat8", 1.0)]
)
def test_the_memory_is_that_of_the_bits_plus_scales(weights: DraftWeights, bytes_per_weight: float) -> None:
    spec = QuantizationSpec(weights, 64)
    shape = torch.Size((64, 256))
    linear = quantized_linear(stack_of(spec, shape), spec, shape, CPU)
    data = NUM_EXPERTS * shape.numel() * bytes_per_weight
    assert data < linear.num_bytes < 1.6 * data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128])
@pytest.mark.parametrize("shape", [(16, 128), (48, 256), (24, 384), (4, 640)])
@pytest.mark.parametrize("weights", ["qint2", "qint4", "qint8", "qfloat8"])
def test_the_memory_is_known_beforehand(
    weights: DraftWeights, shape: tuple[int, int], group_size: int, dtype: torch.dtype
) -> None:
    spec, size = QuantizationSpec(weights, group_size), torch.Size(shape)
    matrices = torch.randn(NUM_EXPERTS, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    linear = quantized_linear(quantize(matrices, spec), spec, size, CPU)
    kernel = kernel_for(spec, size, CPU)
    assert type(linear) is kernel
    assert kernel.device_bytes(spec, NUM_EXPERTS, size, dtype) == linear.num_bytes
    tensors = [value for value in vars(linear).values() if isinstance(value, torch.Tensor)]
    stacks = [value for value in vars(linear).values() if isinstance(value, QuantizedStack)]
    assert linear.num_bytes == sum(tensor.nbytes for tensor in [*tensors, *(part for s in stacks for part in s)])


def test_where_there_is_no_kernel_the_stack_is_kept_as_it_is() -> None:
    spec, shape = QuantizationSpec("qint4", 32), torch.Size((32, 64))
    kernel = kernel_for(spec, shape, torch.device("cuda"))
    assert kernel is DequantizingLinear
    assert kernel.device_bytes(spec, 2, shape, torch.float32) == sum(t.nbytes for t in stack_of(spec, shape))


def test_experts_do_not_mix() -> None:
    spec = QuantizationSpec("qint4", 32)
    shape = torch.Size((16, 32))
    weights = torch.zeros(3, *shape)
    weights[1] = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    linear = quantized_linear(quantize(weights, spec), spec, shape, CPU)
    inputs = torch.ones(2, 32)
    assert [bool(linear(expert, inputs).any()) for expert in range(3)] == [False, True, False]
