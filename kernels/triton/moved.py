"""How many bytes must the product of a packed weight and its inputs move? Each of them once."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Weight(Protocol):
    """A packed weight [n, k]; its bytes are those of its codes and of all that they need."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def nbytes(self) -> int: ...


class RoundedInputs(Protocol):
    """Inputs `data` [tokens, k] with their scales."""

    @property
    def data(self) -> Tensor: ...

    @property
    def nbytes(self) -> int: ...


def weight_only_bytes(m: int, weight: Weight) -> int:
    """With `m` tokens of x and y in halves."""
    n, k = weight.shape
    return weight.nbytes + 2 * m * (n + k)


def rounded_bytes(x: RoundedInputs, weight: Weight) -> int:
    """With rounded inputs, and y in halves."""
    return weight.nbytes + x.nbytes + 2 * x.data.shape[0] * weight.shape[0]
