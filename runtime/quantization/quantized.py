"""What is left of a weight in few bits: which codes, which scales, and which values do they stand for?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from membound.roofline.errors import MemboundError

MOST_BITS = 8
SMALLEST_GROUP = 32  # that the kernels read


class QuantizationError(MemboundError):
    """A weight, a format or statistics with which a quantizer cannot work."""


@dataclass(frozen=True)
class Quantized:
    """Integer codes of a weight [n, k] with a scale, and where it is asymmetric an offset, for each group of a row.

    A value is `code * scale + offset`. Codes are int8 and signed without an offset, uint8 from 0 with one; the last
    group of a row may be shorter than the others.
    """

    codes: Tensor  # [n, k]
    scale: Tensor  # [n, groups], fp32
    offset: Tensor | None  # [n, groups], fp32
    bits: int
    group: int  # columns that share a scale; k for the whole row

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    @property
    def zero(self) -> Tensor | None:
        """The code that stands for 0, [n, groups] in fp32: a whole number where a quantizer chose the grid."""
        if self.offset is None:
            return None
        return torch.where(self.scale > 0, -self.offset / self.scale, 0.0)

    def dequantized(self) -> Tensor:
        """The values that the codes stand for, [n, k] in fp32."""
        scale, offset = self.scale, self.offset
        values = self.codes.float() * spread(scale, self.group, self.codes.shape[1])
        return values if offset is None else values + spread(offset, self.group, self.codes.shape[1])


@dataclass(frozen=True)
class Grid:
    """Evenly spaced values: 2^bits of them for each group of `group` columns; 0 is the whole row.

    Symmetric ones lie around 0 and reach both extremes to half a step (as in GPTQ's code); asymmetric ones reach from
    the least to the largest value, 0 among them, with a whole number as zero point. Scales are rounded to fp16, as they
    are stored, except those of whole rows in 8 bits.
    """

    bits: int
    group: int = 0
    symmetric: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= MOST_BITS:
            raise QuantizationError(f"bits is {self.bits}; integer weights have 2 to {MOST_BITS}")
        if self.group < 0:
            raise QuantizationError(f"group is {self.group}; give the columns that share a scale, or 0 for a row")

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the largest code."""
        return (-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1) if self.symmetric else (0, 2**self.bits - 1)

    def columns(self, k: int) -> int:
        """Columns that share a scale in a row of `k`: `group`, or half of it and so on where that divides the row.

        A row that not even groups of 32 divide has a short last group.
        """
        group = min(self.group or k, k)
        smaller = (group >> halvings for halvings in range(3) if not group % (SMALLEST_GROUP << halvings))
        return next((size for size in smaller if k % size == 0), group)

    def fit(self, block: Tensor, shrink: Tensor | float = 1.0) -> tuple[Tensor, Tensor | None]:
        """Scale and offset [...] for values [..., columns], whose range is multiplied by `shrink` first."""
        if self.symmetric:
            return self._stored(block.abs().amax(-1) * shrink / (2 ** (self.bits - 1) - 0.5)), None
        low, high = block.amin(-1).clamp(max=0) * shrink, block.amax(-1).clamp(min=0) * shrink
        scale = self._stored((high - low) / (2**self.bits - 1))
        return scale, (low / scale).round().clamp(-(2**self.bits - 1), 0) * scale

    def round(self, values: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
        """The nearest codes, in the dtype of `values`; scale and offset broadcast against it."""
        shifted = values if offset is None else values - offset
        return (shifted / scale).round().clamp(*self.limits)

    def nearest(self, values: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
        """The values that `round`'s codes stand for."""
        on_grid = self.round(values, scale, offset) * scale
        return on_grid if offset is None else on_grid + offset

    def _stored(self, scale: Tensor) -> Tensor:
        """Scales as they can be stored; a group of zeros, or of numbers too small for a scale, gets 1: any works."""
        if self.bits < MOST_BITS or self.group:
            scale = scale.clamp(max=torch.finfo(torch.float16).max).half().float()
        return torch.where(scale > 0, scale, 1.0)

    def quantized(self, codes: Tensor, scale: Tensor, offset: Tensor | None) -> Quantized:
        """Codes [n, k] with scale and offset [n, groups], in the dtypes of `Quantized`."""
        dtype = torch.int8 if self.symmetric else torch.uint8
        return Quantized(codes.to(dtype), scale, offset, self.bits, self.columns(codes.shape[1]))


def grouped(values: Tensor, group: int) -> Tensor:
    """Rows [n, k] as [n, groups, group]; a short last group is filled up with zeros."""
    n, k = values.shape
    missing = -k % group
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return padded.reshape(n, -1, group)


def spread(parameters: Tensor, group: int, k: int) -> Tensor:
    """Parameters [n, groups] for each of k columns: [n, k]."""
    return parameters.repeat_interleave(group, dim=1)[:, :k]


def checked(weight: Tensor) -> Tensor:
    """A linear weight [n, k] in fp32; raises QuantizationError where it is no matrix of finite numbers."""
    if weight.dim() != 2 or not weight.numel():
        raise QuantizationError(f"a linear weight has two dimensions that are not 0, not shape {list(weight.shape)}")
    weight = weight.float()
    if not torch.isfinite(weight).all():
        raise QuantizationError("the weight has values that are not finite; nothing can be rounded to them")
    return weight
