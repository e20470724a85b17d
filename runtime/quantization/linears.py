"""How is a quantized weight multiplied: by a kernel that reads its codes, or by one that reads what they stand for?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from membound.kernels.base import Kernels, WeightFormat
from membound.roofline.precision import Precision
from membound.runtime.linear import KernelLinear, Linear, WrappedLinear
from membound.runtime.quantization.fp8 import BLOCK, Float8, round_fp8_per_tensor, round_fp8_per_token
from membound.runtime.quantization.quantized import MOST_BITS, SMALLEST_GROUP, Quantized
from membound.runtime.quantization.rtn import round_per_token


def integer_linear(kernels: Kernels, quantized: Quantized) -> Linear:
    """A linear that reads the codes where the kernels have their layout, and one that reads their values elsewhere."""
    format = packed_format(quantized)
    if format is None:
        return EmulatedLinear(kernels, quantized.dequantized().to(torch.bfloat16))
    return _packed(kernels, quantized, format)


def packed_format(quantized: Quantized) -> WeightFormat | None:
    """The format in which kernels read these codes; None where no layout takes them."""
    k, bits, group = quantized.shape[1], quantized.bits, quantized.group
    if k % group or group % SMALLEST_GROUP or (bits == MOST_BITS and quantized.offset is not None):
        return None
    return _PACKED.get(bits)


def _packed(kernels: Kernels, quantized: Quantized, format: WeightFormat) -> Linear:
    k, bits, group = quantized.shape[1], quantized.bits, quantized.group
    symmetric = quantized.offset is None
    codes, scale = quantized.codes, quantized.scale
    if symmetric and bits < MOST_BITS:
        codes = codes.to(torch.int16) + 2 ** (bits - 1)  # the kernels count from 0
    if bits == MOST_BITS and group == k:
        scale = scale[:, 0]
    return KernelLinear(kernels, kernels.pack_codes(codes, scale, quantized.zero, format))


def int8_linear(kernels: Kernels, quantized: Quantized) -> Linear:
    """A linear of int8 codes, a scale a row, that rounds its inputs to int8 as well."""
    return KernelLinear(kernels, kernels.pack_codes(quantized.codes, quantized.scale[:, 0], None, "w8a8"))


def w4a8_linear(kernels: Kernels, quantized: Quantized) -> Linear | None:
    """A linear of int4 codes that rounds its inputs to int8 as well, with a scale for up to 128 of them.

    None where no layout takes the codes.
    """
    return _packed(kernels, quantized, "w4a8") if packed_format(quantized) == "int4" else None


def fp8_linear(kernels: Kernels, weight: Float8) -> Linear:
    """A linear that reads E4M3 where the kernels have their layout, and one that reads their values elsewhere."""
    packed = kernels.pack_fp8(weight.codes, _kernel_scale(weight), rounds_inputs=False)
    if packed is None:
        return EmulatedLinear(kernels, weight.dequantized().to(torch.bfloat16))
    return KernelLinear(kernels, packed)


def fp8_w8a8_linear(kernels: Kernels, weight: Float8, activations: Precision) -> Linear | None:
    """A linear of E4M3 that rounds its inputs to it as well; None where no kernel does so with these scales."""
    columns = BLOCK if weight.granularity == "block" else 0
    by_token = [(s.rows, s.columns) for s in activations.scales] == [(1, columns)]
    whole_step = of_whole_step(activations)
    if activations.values != "fp8" or not (by_token or whole_step):
        return None
    packed = kernels.pack_fp8(weight.codes, _kernel_scale(weight), rounds_inputs=True, whole_step=whole_step)
    return None if packed is None else KernelLinear(kernels, packed)


def of_whole_step(activations: Precision) -> bool:
    """Whether one scale holds for the activations of all tokens of a step."""
    return bool(activations.scales) and activations.scales[0].rows != 1


def _kernel_scale(weight: Float8) -> Tensor:
    """[n], or a scale a block."""
    if weight.granularity == "block":
        return weight.scale
    return weight.scale[:, 0].expand(weight.codes.shape[0]).contiguous()


_PACKED: dict[int, WeightFormat] = {8: "int8", 4: "int4", 3: "int3", 2: "int2"}


class EmulatedLinear(WrappedLinear):
    """A weight as the values that its codes stand for, in bf16: the right numbers, at the wrong speed."""

    def __init__(self, kernels: Kernels, values: Tensor) -> None:
        super().__init__(KernelLinear(kernels, kernels.pack(values, "bf16")))

    @property
    def emulated(self) -> bool:
        return True

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x)


@dataclass(frozen=True)
class Changed:
    """What is done to activations [m, k] before they are multiplied; `emulated` where its time means nothing.

    With `whole_step` what becomes of a token depends on the others.
    """

    apply: Callable[[Tensor], Tensor]
    emulated: bool = False
    whole_step: bool = False


class ChangedInput(WrappedLinear):
    """Another linear whose inputs are changed first: scaled, rotated, or rounded."""

    def __init__(self, inner: Linear, change: Changed) -> None:
        super().__init__(inner)
        self.change = change

    @property
    def emulated(self) -> bool:
        return self.change.emulated or self.inner.emulated

    @property
    def whole_step(self) -> bool:
        return self.change.whole_step or self.inner.whole_step

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(self.change.apply(x).to(x.dtype))


class SplitLinear:
    """Two linears whose outputs are added: all columns but a few, and those few from the same inputs."""

    def __init__(self, regular: Linear, few: Linear, columns: Tensor) -> None:
        self.regular = regular
        self.few = few
        self.columns = columns

    @property
    def shape(self) -> tuple[int, int]:
        return self.regular.shape

    @property
    def nbytes(self) -> int:
        return self.regular.nbytes + self.few.nbytes + self.columns.nbytes

    @property
    def emulated(self) -> bool:
        return self.regular.emulated or self.few.emulated

    @property
    def whole_step(self) -> bool:
        return self.regular.whole_step or self.few.whole_step

    def __call__(self, x: Tensor) -> Tensor:
        few = x.index_select(1, self.columns)
        return self.regular(x.index_fill(1, self.columns, 0)) + self.few(few)


def rounding(activations: Precision, clip: float = 1.0) -> Changed | None:
    """Rounds activations as a format does, in each step; None for 16 bits and more."""
    if activations.width >= 16:
        return None
    columns = activations.scales[0].columns if activations.scales else 0
    if activations.values == "fp8":
        whole = of_whole_step(activations)
        rounded = round_fp8_per_tensor if whole else lambda x: round_fp8_per_token(x, columns)
        return Changed(rounded, emulated=True, whole_step=whole)
    return Changed(lambda x: round_per_token(x, activations.width, clip, columns), emulated=True)
