"""How do the columns that are still free make up for what rounding or pruning one column did to the output?

The optimal brain surgeon's step with one Hessian for all rows, columns in a fixed order (Frantar et al., GPTQ, 2022,
arXiv 2210.17323, algorithm 1; SparseGPT, 2023, arXiv 2301.00774, section 3). The output error of a linear is
quadratic in its weights with the inputs' second moments as Hessian, so that the best correction is known.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from membound.runtime.quantization.quantized import QuantizationError

BLOCK = 128  # columns whose corrections are applied at once to all columns behind them
_MOST_DAMPING = 1.0


def inverse_factor(second_moments: Tensor, damping: float = 0.01) -> Tensor:
    """Upper Cholesky factor U [k, k] of the inverse Hessian, H^-1 = U^T U.

    `damping` times the mean of the diagonal is added to it, more where that does not make it positive definite.
    """
    if not damping > 0:
        raise QuantizationError(f"damping is {damping}; it must be above 0, as the second moments may be singular")
    hessian = second_moments.double()
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    if not torch.isfinite(mean):
        raise QuantizationError("the second moments are not finite: the calibration run gave no usable activations")
    eye = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    if mean == 0:
        return eye.float()
    while damping <= _MOST_DAMPING:
        lower, failed = torch.linalg.cholesky_ex(hessian + damping * mean * eye)
        if not failed:
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return factor.float()
        damping *= 10
    raise QuantizationError("the second moments are no positive matrix, even damped; calibrate on more text")


def sweep(
    weight: Tensor,
    factor: Tensor,
    replace: Callable[[int, Tensor], Tensor],
    look: Callable[[int, Tensor], None] = lambda column, rest: None,
) -> Tensor:
    """Replaces the columns of weight [n, k] from left to right, and corrects those to the right of each.

    `replace(column, values [n])` gives a column's new values. Before that `look(column, rest [n, columns])` sees the
    columns from this one to the end of its block, with all corrections so far. Returns the replaced columns [n, k].
    """
    weight = weight.clone()
    k = weight.shape[1]
    for start in range(0, k, BLOCK):
        end = min(start + BLOCK, k)
        block, errors = weight[:, start:end], torch.empty_like(weight[:, start:end])
        for i in range(end - start):
            column, row = start + i, factor[start + i, start:end]
            look(column, block[:, i:])
            old = block[:, i].clone()
            new = replace(column, old)
            error = (old - new) / row[i]
            block[:, i + 1 :] -= error[:, None] * row[None, i + 1 :]
            block[:, i], errors[:, i] = new, error
        weight[:, end:] -= errors @ factor[start:end, end:]
    return weight
