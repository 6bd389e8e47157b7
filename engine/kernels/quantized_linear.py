"""Products with quantized experts: real kernels where the device has them, plain dequantization elsewhere."""

from typing import Protocol

import torch
from torch.nn import functional

from engine.kernels.quantization import QuantizationSpec, QuantizedStack, dequantize, stack_bytes, unpack


class QuantizedLinear(Protocol):
    """One projection of all experts of a layer, on the device."""

    num_bytes: int

    def __call__(self, expert: int, inputs: torch.Tensor) -> torch.Tensor:
        """[n, out] from `inputs` [n, in], in the type of the inputs."""


class Int4Linear:
    """torch's CPU kernel for 4-bit weights, which computes in bfloat16: `weight = (q - 8) * scale + zero`.

    quanto's `weight = q * scale - shift` therefore has `zero = 8 * scale - shift`.
    """

    GROUP_SIZES = (32, 64, 128, 256)
    ROW_MULTIPLE = 16

    def __init__(self, stack: QuantizedStack, spec: QuantizationSpec, shape: torch.Size) -> None:
        self._group_size = spec.group_size
        self._packed = torch.stack(
            [
                torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack(data, spec, shape).int(), 1)
                for data in stack.data
            ]
        )
        scale = stack.scale.squeeze(-1).float()  # [E, out, groups]
        zero = 8 * scale - stack.shift.squeeze(-1).float()
        self._scales_and_zeros = torch.stack([scale, zero], dim=-1).transpose(1, 2).to(torch.bfloat16).contiguous()
        self.num_bytes = self._packed.nbytes + self._scales_and_zeros.nbytes

    @staticmethod
    def device_bytes(spec: QuantizationSpec, num_experts: int, shape: torch.Size, dtype: torch.dtype) -> int:
        # Whatever the type of the weights, scales and zeros are bfloat16.
        return stack_bytes(spec, num_experts, shape, torch.bfloat16)

    @classmethod
    def supports(cls, spec: QuantizationSpec, shape: torch.Size, device: torch.device) -> bool:
        return (
            device.type == "cpu"
            and spec.weights == "qint4"
            and spec.group_size in cls.GROUP_SIZES
            and shape[0] % cls.ROW_MULTIPLE == 0
        )

    def __call__(self, expert: int, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            inputs.to(torch.bfloat16), self._packed[expert], self._group_size, self._scales_and_zeros[expert]
        )
        return outputs.to(inputs.dtype)


class Int8Linear:
    """torch's CPU kernel for 8-bit weights with one scale per row, which computes in bfloat16."""

    COLUMN_MULTIPLE = 16
    """The kernel loads so many weights at once, and reads beyond the row where that does not divide it."""

    def __init__(self, stack: QuantizedStack, spec: QuantizationSpec, shape: torch.Size) -> None:
        self._data = stack.data
        self._scale = stack.scale.squeeze(-1).to(torch.bfloat16)
        self.num_bytes = self._data.nbytes + self._scale.nbytes

    @staticmethod
    def device_bytes(spec: QuantizationSpec, num_experts: int, shape: torch.Size, dtype: torch.dtype) -> int:
        return stack_bytes(spec, num_experts, shape, torch.bfloat16)

    @classmethod
    def supports(cls, spec: QuantizationSpec, shape: torch.Size, device: torch.device) -> bool:
        return device.type == "cpu" and spec.weights == "qint8" and shape[1] % cls.COLUMN_MULTIPLE == 0

    def __call__(self, expert: int, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = torch.ops.aten._weight_int8pack_mm(
            inputs.to(torch.bfloat16), self._data[expert], self._scale[expert]
        )
        return outputs.to(inputs.dtype)


class DequantizingLinear:
    """Dequantizes a matrix each time that it is used: any type, any device, slow."""

    def __init__(self, stack: QuantizedStack, spec: QuantizationSpec, shape: torch.Size) -> None:
        self._stack = stack
        self._spec = spec
        self._shape = shape
        self.num_bytes = sum(tensor.nbytes for tensor in stack)

    device_bytes = staticmethod(stack_bytes)

    def __call__(self, expert: int, inputs: torch.Tensor) -> torch.Tensor:
        weight = dequantize(self._stack, expert, self._spec, self._shape)
        return functional.linear(inputs, weight.to(inputs.dtype))


Kernel = type[Int4Linear] | type[Int8Linear] | type[DequantizingLinear]


def kernel_for(spec: QuantizationSpec, shape: torch.Size, device: torch.device) -> Kernel:
    """The best kernel for matrices of `shape` [out, in] on the device.

    Its `device_bytes(spec, num_experts, shape, dtype)` are known before there are weights, of type `dtype`.
    """
    if Int4Linear.supports(spec, shape, device):
        return Int4Linear
    return Int8Linear if Int8Linear.supports(spec, shape, device) else DequantizingLinear


def quantized_linear(
    stack: QuantizedStack, spec: QuantizationSpec, shape: torch.Size, device: torch.device
) -> QuantizedLinear:
    """The matrices of `shape` [out, in] on the device, behind the best kernel for them."""
    kernel = kernel_for(spec, shape, device)
    if kernel is not Int4Linear:  # which converts its weights where they are
        stack = QuantizedStack(*(tensor.to(device) for tensor in stack))
    return kernel(stack, spec, shape)
