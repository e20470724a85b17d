"""Round to nearest: what does a weight become when each value is rounded by itself? The baseline of all others."""

from __future__ import annotations

import torch
from torch import Tensor

from membound.runtime.quantization.quantized import Grid, Quantized, checked, grouped


def round_to_nearest(weight: Tensor, grid: Grid, shrink: Tensor | float = 1.0) -> Quantized:
    """Weight [n, k] on a grid that reaches `shrink` [n, groups] times as far as the values do."""
    weight = checked(weight)
    k = weight.shape[1]
    blocks = grouped(weight, grid.columns(k))  # [n, groups, group]
    scale, offset = grid.fit(blocks, shrink)
    codes = grid.round(blocks, scale[..., None], None if offset is None else offset[..., None])
    return grid.quantized(codes.flatten(1)[:, :k], scale, offset)


def round_per_token(x: Tensor, bits: int, clip: float = 1.0, group: int = 0) -> Tensor:
    """Activations [m, k] rounded to symmetric integers, with a scale for each token or `group` of its values, as fp32.

    `clip` makes the grid reach less far than the largest value, which costs less than it saves at 4 bits
    (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456, section 4: 0.9).
    """
    m, k = x.shape
    most = 2 ** (bits - 1) - 1
    values = grouped(x.float(), min(group or k, k))  # [m, groups, group]
    scale = values.abs().amax(-1, keepdim=True) * clip / most
    scale = torch.where(scale > 0, scale, 1.0)
    return ((values / scale).round_().clamp_(-most - 1, most) * scale).view(m, -1)[:, :k]
