"""Which weights of a matrix are kept, all over it or two of every four?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from membound.runtime.quantization.quantized import QuantizationError

Pattern = Literal["unstructured", "2:4"]


@dataclass(frozen=True)
class Pruned:
    """A weight [n, k] with zeros where `kept` [n, k] is false."""

    weight: Tensor
    kept: Tensor

    def dequantized(self) -> Tensor:
        """The values [n, k] in fp32."""
        return self.weight.float()


def checked_share(sparsity: float, pattern: Pattern, k: int) -> None:
    """Raises QuantizationError for a share of zeros or a width that the pattern does not have."""
    if not 0 <= sparsity < 1:
        raise QuantizationError(f"sparsity is {sparsity}; give the share of weights that become 0, from 0 to below 1")
    if pattern == "2:4" and (sparsity != 0.5 or k % 4):
        raise QuantizationError(
            f"2:4 sparsity keeps half of a row whose length 4 divides, not {1 - sparsity:.0%} of {k} columns"
        )


def two_of_four(scores: Tensor) -> Tensor:
    """Where the two largest scores of every four neighbours in a row are, [n, k] bool; the first among equals."""
    groups = scores.unflatten(-1, (-1, 4))
    best = groups.argsort(dim=-1, descending=True, stable=True)[..., :2]
    return torch.zeros_like(groups, dtype=torch.bool).scatter(-1, best, True).flatten(-2)


def largest_of_all(scores: Tensor, sparsity: float) -> Tensor:
    """Where the largest scores are when the `sparsity` smallest of all are dropped, bool; the last among equals."""
    dropped = int(sparsity * scores.numel())
    kept = torch.ones(scores.numel(), dtype=torch.bool, device=scores.device)
    kept[scores.flatten().argsort(stable=True)[:dropped]] = False
    return kept.view(scores.shape)


def largest_of_rows(scores: Tensor, sparsity: float) -> Tensor:
    """The same row by row: every row keeps as many."""
    dropped = int(sparsity * scores.shape[1])
    worst = scores.argsort(dim=1, stable=True)[:, :dropped]
    return torch.ones_like(scores, dtype=torch.bool).scatter(1, worst, False)
