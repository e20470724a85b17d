"""How are hidden states normed before or after a part of a layer?"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from membound.kernels.base import Kernels


class Norm(Protocol):
    """Brings hidden states to one size."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, width] normed, in the kernels' activation type."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds x into `residual` in place and returns the norm of the sum, all [tokens, width]."""


class RmsNorm:
    """x / rms(x) * weight, by the device's kernels; the weight is fp32 [width]."""

    def __init__(self, kernels: Kernels, weight: Tensor, eps: float) -> None:
        self.kernels = kernels
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm:
    """(x - mean(x)) / std(x) * weight + bias; without a weight only the first, without a bias no offset."""

    def __init__(self, kernels: Kernels, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        self.kernels = kernels
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps, residual)
