"""SparseGPT: what is left when the weights go that cost the output least, and the others make up for them?

Frantar, Alistarh: SparseGPT, 2023, arXiv 2301.00774, algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from membound.runtime.quantization.quantized import checked
from membound.runtime.quantization.sparsity import Pattern, Pruned, checked_share, largest_of_all, two_of_four
from membound.runtime.quantization.surgeon import BLOCK, inverse_factor, sweep


def sparsegpt(
    weight: Tensor, second_moments: Tensor, sparsity: float = 0.5, pattern: Pattern = "unstructured"
) -> Pruned:
    """Weight [n, k] pruned column by column with the inputs' second moments [k, k].

    What goes is chosen by w^2 / [H^-1], all over a block of 128 columns or in every four of a row, when the block's
    first column is reached: all corrections by columns before it count.
    """
    weight = checked(weight)
    k = weight.shape[1]
    checked_share(sparsity, pattern, k)
    weight = weight.masked_fill(second_moments.diagonal() == 0, 0)
    factor = inverse_factor(second_moments)
    diagonal = factor.diagonal()
    kept = torch.ones_like(weight, dtype=torch.bool)
    period = 4 if pattern == "2:4" else BLOCK

    def choose(column: int, rest: Tensor) -> None:
        if column % period:
            return
        until = min(column + period, k)
        scores = (rest[:, : until - column] / diagonal[column:until]).square()
        kept[:, column:until] = two_of_four(scores) if pattern == "2:4" else largest_of_all(scores, sparsity)

    pruned = sweep(weight, factor, lambda column, values: values * kept[:, column], choose)
    return Pruned(pruned, kept)
