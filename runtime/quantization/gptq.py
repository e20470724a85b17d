"""GPTQ: what does a weight become when later columns make up for the rounding of earlier ones?

Frantar, Ashkboos, Hoefler, Alistarh: GPTQ, 2022, arXiv 2210.17323.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from membound.runtime.quantization.quantized import Grid, Quantized, checked, grouped
from membound.runtime.quantization.ranges import search_shrinks
from membound.runtime.quantization.surgeon import BLOCK, inverse_factor, sweep


def gptq(
    weight: Tensor,
    second_moments: Tensor,
    grid: Grid,
    *,
    act_order: bool = True,
    keep_zeros: bool = False,
) -> Quantized:
    """Weight [n, k] rounded column by column with the inputs' second moments [k, k].

    With `act_order` columns of large inputs come first. Groups keep their places then, with scales fitted beforehand,
    so that the codes need no index a column (the static groups of the authors' code); without it a group's scale is
    fitted when its first column is reached. Either way a group's range is what costs its own output least.
    With `keep_zeros` what is 0 stays 0: the weight is pruned.
    """
    weight = checked(weight)
    zeros = weight == 0 if keep_zeros else None
    k = weight.shape[1]
    group = grid.columns(k)
    dead = second_moments.diagonal() == 0  # never an input: its weight may be anything
    weight = weight.masked_fill(dead, 0)
    order = second_moments.diagonal().argsort(descending=True) if act_order else torch.arange(k, device=weight.device)
    factor = inverse_factor(second_moments[order][:, order])
    shrinks = search_shrinks(weight, second_moments, grid)
    scale, offset = grid.fit(grouped(weight, group), shrinks)  # [n, groups]
    codes = torch.empty_like(weight)
    columns = order.tolist()

    def fit_on_arrival(column: int, rest: Tensor) -> None:
        if column % group:
            return
        own = rest[:, :group]
        moments = second_moments[column : column + group, column : column + group]
        found = grid.fit(own, search_shrinks(own, moments, replace(grid, group=0))[:, 0])
        scale[:, column // group] = found[0]
        if offset is not None and found[1] is not None:
            offset[:, column // group] = found[1]

    def to_grid(column: int, values: Tensor) -> Tensor:
        at = columns[column]
        own_scale, own_offset = scale[:, at // group], None if offset is None else offset[:, at // group]
        if zeros is not None:
            values = values.masked_fill(zeros[:, at], 0)
        codes[:, at] = grid.round(values, own_scale, own_offset)
        on_grid = codes[:, at] * own_scale
        return on_grid if own_offset is None else on_grid + own_offset

    # A group that reaches beyond a block is not corrected to its end when its first column comes.
    refit = not act_order and group <= BLOCK and BLOCK % group == 0
    if refit:
        sweep(weight, factor, to_grid, fit_on_arrival)
    else:
        sweep(weight[:, order], factor, to_grid)
    return grid.quantized(codes, scale, offset)
