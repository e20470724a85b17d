"""Magnitude pruning: what is left when the smallest weights of a matrix go? The baseline of the other pruners.

Han et al., Learning both weights and connections, 2015, arXiv 1506.02626, one matrix at a time.
"""

from __future__ import annotations

from torch import Tensor

from membound.runtime.quantization.quantized import checked
from membound.runtime.quantization.sparsity import Pattern, Pruned, checked_share, largest_of_all, two_of_four


def prune_by_magnitude(weight: Tensor, sparsity: float = 0.5, pattern: Pattern = "unstructured") -> Pruned:
    """Weight [n, k] without its smallest values."""
    weight = checked(weight)
    checked_share(sparsity, pattern, weight.shape[1])
    scores = weight.abs()
    kept = two_of_four(scores) if pattern == "2:4" else largest_of_all(scores, sparsity)
    return Pruned(weight * kept, kept)
