"""How far should a group's grid reach, where its largest values cost less when they are cut off than they save?

Searched by the output error that the inputs' second moments give, as AWQ does (arXiv 2306.00978, section 3.2, weight
clipping in its code) and GPTQ's code with its option `mse`. At 3 bits most of what either gains comes from here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from membound.runtime.quantization.quantized import Grid, grouped

SHRINKS = tuple(1 - step / 20 for step in range(10))  # of a group's range, from 1 to 0.55


def search_shrinks(weight: Tensor, second_moments: Tensor, grid: Grid) -> Tensor:
    """How far each group's grid reaches [n, groups], as a share of its range, with the least output error of its own.

    Groups are searched by themselves: what two of them do to the same output is left out, as in the authors' code.
    """
    n, k = weight.shape
    group = grid.columns(k)
    blocks = grouped(weight, group)  # [n, groups, group]
    moments = torch.zeros(blocks.shape[1], group, group, device=weight.device)
    for i in range(blocks.shape[1]):
        part = second_moments[i * group : (i + 1) * group, i * group : (i + 1) * group]
        moments[i, : len(part), : len(part)] = part
    best = torch.ones(n, blocks.shape[1], device=weight.device)
    least = torch.full_like(best, float("inf"))
    for shrink in SHRINKS:
        scale, offset = grid.fit(blocks, shrink)
        error = blocks - grid.nearest(blocks, scale[..., None], None if offset is None else offset[..., None])
        through = torch.bmm(error.transpose(0, 1), moments).transpose(0, 1)  # [n, groups, group]
        loss = (through * error).sum(-1)
        best = torch.where(loss < least, shrink, best)
        least = torch.minimum(loss, least)
    return best


def output_error(difference: Tensor, second_moments: Tensor) -> float:
    """Mean over tokens of the squared length of `difference` [n, k] times an input."""
    return float(((difference @ second_moments) * difference).sum())
