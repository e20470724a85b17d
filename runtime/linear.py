"""What is a linear layer, whatever the format of its weights?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from membound.kernels.base import Kernels, PackedWeight
from membound.kernels.routing import GroupedLinear


class Linear(Protocol):
    """A weight [n, k] and the way to multiply with it."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows n and columns k."""

    @property
    def nbytes(self) -> int:
        """Bytes that a step reads of it."""

    @property
    def emulated(self) -> bool:
        """Whether it computes the right numbers in a way whose time means nothing."""

    @property
    def whole_step(self) -> bool:
        """Whether what it makes of a token depends on the step's other tokens, as with one scale for all of them."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [m, k] times the weight transposed: [m, n] in the kernels' activation type."""


class KernelLinear:
    """A packed weight, multiplied by the device's kernels."""

    def __init__(self, kernels: Kernels, weight: PackedWeight) -> None:
        self.weight = weight
        self.emulated = kernels.emulates(weight)
        self.whole_step = bool(getattr(weight, "whole_step", False))
        self._linear = kernels.linear

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self.weight)


class WrappedLinear:
    """Another linear layer, with something done to what goes in or comes out."""

    def __init__(self, inner: Linear) -> None:
        self.inner = inner

    @property
    def shape(self) -> tuple[int, int]:
        return self.inner.shape

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    @property
    def emulated(self) -> bool:
        return self.inner.emulated

    @property
    def whole_step(self) -> bool:
        return self.inner.whole_step


class BiasedLinear(WrappedLinear):
    """A linear layer and the bias [n] that is added to what it returns."""

    def __init__(self, kernels: Kernels, inner: Linear, bias: Tensor) -> None:
        super().__init__(inner)
        self.kernels = kernels
        self.bias = bias.to(kernels.activation_dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.add_bias(self.inner(x), self.bias)


def grouped(kernels: Kernels, linears: Sequence[Linear]) -> GroupedLinear | None:
    """The linear layers of a mixture's experts as one, whose memory theirs then is; None where they stay apart."""
    inner = [linear.inner if isinstance(linear, BiasedLinear) else linear for linear in linears]
    biases = [linear.bias for linear in linears if isinstance(linear, BiasedLinear)]
    kept = [linear for linear in inner if isinstance(linear, KernelLinear)]
    if len(kept) < len(linears) or len(biases) not in (0, len(linears)):
        return None
    group = kernels.grouped([linear.weight for linear in kept], biases or None)
    if group is not None:
        for linear, weight in zip(kept, group.weights, strict=True):
            linear.weight = weight
    return group
