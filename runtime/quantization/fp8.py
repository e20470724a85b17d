"""fp8: what does a weight become in 8-bit floating point, with one scale a matrix, a row or a block?

E4M3 without infinities (Micikevicius et al., FP8 formats for deep learning, 2022, arXiv 2209.05433, table 1: largest
value 448); blocks of 128 x 128 as in DeepSeek-V3 (technical report, 2024, arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from membound.runtime.quantization.quantized import checked, grouped

Granularity = Literal["tensor", "row", "block"]

BLOCK = 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class Float8:
    """A weight [n, k] in E4M3; `scale` is [1, 1], [n, 1] or [ceil(n / 128), ceil(k / 128)] in fp32."""

    codes: Tensor
    scale: Tensor
    granularity: Granularity

    def dequantized(self) -> Tensor:
        """The values [n, k] in fp32."""
        return self.codes.float() * _spread(self.scale, self.codes.shape, self.granularity)


def to_fp8(weight: Tensor, granularity: Granularity = "tensor") -> Float8:
    """Weight [n, k] scaled so that the largest value of each part becomes 448, and rounded to nearest even."""
    weight = checked(weight)
    n, k = weight.shape
    if granularity == "tensor":
        largest = weight.abs().amax().view(1, 1)
    elif granularity == "row":
        largest = weight.abs().amax(1, keepdim=True)
    else:
        padded = torch.nn.functional.pad(weight.abs(), (0, -k % BLOCK, 0, -n % BLOCK))
        largest = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK).amax((1, 3))
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    codes = (weight / _spread(scale, weight.shape, granularity)).clamp(-LARGEST, LARGEST)
    return Float8(codes.to(torch.float8_e4m3fn), scale, granularity)


def round_fp8_per_token(x: Tensor, group: int = 0) -> Tensor:
    """Activations [m, k] in E4M3 with a scale for each token, or for `group` of its values, as values in fp32."""
    m, k = x.shape
    values = grouped(x.float(), min(group or k, k))  # [m, groups, group]
    return _rounded(values, values.abs().amax(-1, keepdim=True)).view(m, -1)[:, :k]


def round_fp8_per_tensor(x: Tensor) -> Tensor:
    """Activations [m, k] in E4M3 with one scale for all of a step, as values in fp32."""
    return _rounded(x.float(), x.float().abs().amax())


def _rounded(values: Tensor, largest: Tensor) -> Tensor:
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    return (values / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


def _spread(scale: Tensor, shape: torch.Size | tuple[int, int], granularity: Granularity) -> Tensor:
    if granularity != "block":
        return scale
    n, k = shape
    return scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
