"""Wanda: what is left when weights go whose size times that of their input is smallest in their row?

Sun et al., A simple and effective pruning approach for large language models, 2023, arXiv 2306.11695, equation 1.
"""

from __future__ import annotations

from torch import Tensor

from membound.runtime.quantization.quantized import checked
from membound.runtime.quantization.sparsity import Pattern, Pruned, checked_share, largest_of_rows, two_of_four


def wanda(weight: Tensor, mean_square: Tensor, sparsity: float = 0.5, pattern: Pattern = "unstructured") -> Pruned:
    """Weight [n, k] without the smallest |w| * norm of x in each row; inputs have `mean_square` [k]."""
    weight = checked(weight)
    checked_share(sparsity, pattern, weight.shape[1])
    scores = weight.abs() * mean_square.sqrt()
    kept = two_of_four(scores) if pattern == "2:4" else largest_of_rows(scores, sparsity)
    return Pruned(weight * kept, kept)
