"""How is a [n, k] weight laid out in each of the formats that `linear` reads?"""

from __future__ import annotations

import torch
from torch import Tensor

from membound.kernels.arena import Arena
from membound.kernels.base import PackedWeight, WeightFormat


def pack(weight: Tensor, format: WeightFormat, arena: Arena | None = None) -> PackedWeight:
    """fp32 and bf16 are a cast; int8 is symmetric, rounded to nearest, one fp32 scale a row (an error of scale / 2).

    What is not in its format yet is written into `arena`, where a CPU reads it faster.
    """
    if weight.dim() != 2:
        raise ValueError(f"a linear weight has two dimensions, this one has shape {tuple(weight.shape)}")
    if format == "fp32":
        return PackedWeight(format, _cast(weight, torch.float32, arena))
    if format == "bf16":
        return PackedWeight(format, _cast(weight, torch.bfloat16, arena))
    if format == "int8":
        scale = weight.abs().amax(dim=1).float() / 127  # [n]
        divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
        shape = weight.shape
        data = arena.empty(shape, torch.int8) if arena else torch.empty(shape, dtype=torch.int8, device=weight.device)
        for rows in range(0, weight.shape[0], _ROWS):  # bounds the fp32 copy of a large weight
            part = slice(rows, rows + _ROWS)
            data[part] = (weight[part].float() / divisor[part, None]).round_().clamp_(-127, 127)
        return PackedWeight(format, data, scale)
    raise ValueError(f"no such weight format: {format}")


def _cast(weight: Tensor, dtype: torch.dtype, arena: Arena | None) -> Tensor:
    if weight.dtype == dtype and weight.is_contiguous():
        return weight
    return arena.like(weight, dtype) if arena else weight.to(dtype).contiguous()


_ROWS = 4096
