"""What is one run of a kernel: its inputs, its result beside the fp32 reference, the bytes and FLOPs it must move?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Math = Literal["bf16", "int8", "fp8"]
Run = Callable[[], Any]
# Of a result in bf16: products and sums are in fp32. Triton's interpreter cuts bf16 off where a GPU rounds it.
BF16_ROUNDING = 2.0**-7
# Of the largest sum of fp8 products: Hopper aligns up to 128 of them to the largest and cuts about 14 bits behind its
# first (DeepSeek-V3, 2024, section 3.3.2). That is 2**-13 of the largest, which is up to 16 times a usual product, in
# each of k products of either sign, whose own sum grows with the root of k as well.
FP8_SUMS = 2.0**-9


@dataclass(frozen=True)
class Comparison:
    """A result and its reference: they may differ by `atol` (one number, or one an element) and `rtol` of it."""

    result: Tensor
    reference: Tensor
    rtol: float
    atol: float | Tensor

    def error(self) -> float:
        """The largest difference, as a share of the reference's largest number; infinite if anything is NaN."""
        if self.result.shape != self.reference.shape:
            return math.inf
        if self.reference.numel() == 0:
            return 0.0
        largest = float(self.reference.double().abs().max()) or 1.0
        return _finite(float(self._difference().max()) / largest)

    def used(self) -> float:
        """The largest share of its tolerance that an element takes: above 1 is wrong."""
        if self.result.shape != self.reference.shape:
            return math.inf
        if self.reference.numel() == 0:
            return 0.0
        difference = self._difference()
        allowed = self.rtol * self.reference.double().abs() + self.atol
        share = torch.where(difference == 0, 0.0, difference / allowed)
        return _finite(float(share.max()))

    def _difference(self) -> Tensor:
        return (self.result.double() - self.reference.double()).abs()


def _finite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def exact(result: Tensor, reference: Tensor) -> Comparison:
    """Of numbers that must be equal."""
    return Comparison(result, reference, 0.0, 0.0)


def product(result: Tensor, reference: Tensor) -> Comparison:
    """Of a sum in fp32 that is rounded to bf16 once."""
    return Comparison(result, reference, BF16_ROUNDING, 2e-5 * (_largest(reference) + 1))


def fp8_product(result: Tensor, reference: Tensor) -> Comparison:
    """Of a sum of fp8 products on tensor cores that is rounded to bf16 once."""
    return Comparison(result, reference, BF16_ROUNDING, FP8_SUMS * _largest(reference))


def attended(result: Tensor, reference: Tensor) -> Comparison:
    """Of an attention, whose queries, probabilities and result are in bf16."""
    return Comparison(result, reference, 0.0, 2e-2 * _largest(reference))


def recurrent(result: Tensor, reference: Tensor) -> Comparison:
    """Of a state, or of what is read from one."""
    return Comparison(result, reference, 0.0, BF16_ROUNDING * _largest(reference))


def _largest(reference: Tensor) -> float:
    return float(reference.abs().max()) if reference.numel() else 0.0


@dataclass(frozen=True)
class Trial:
    """A kernel on one set of inputs.

    `compare` gets what `run` returned the first time. `flops` are of the precision `math`. A peer is made when it is
    asked for; what it lacks it raises, and what it makes does the same work on inputs of the same size.
    """

    run: Run
    compare: Callable[[Any], Sequence[Comparison]]
    nbytes: int
    flops: int = 0
    math: Math = "bf16"
    peers: Mapping[str, Callable[[], Run]] = field(default_factory=dict)


class Inputs:
    """Random tensors on a device."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self._random = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self._random, dtype=dtype, device=self.device)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(shape, generator=self._random, dtype=dtype, device=self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """From `low` to `high` - 1."""
        return torch.randint(low, high, shape, generator=self._random, dtype=dtype, device=self.device)

    def order(self, count: int) -> Tensor:
        """The numbers 0 to `count` - 1, shuffled."""
        return torch.randperm(count, generator=self._random, device=self.device)

    def of(self, values: Sequence[float], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Case:
    """One kernel at one size. A small one runs in Triton's interpreter too, a large one is what serving launches."""

    kernel: str
    name: str
    make: Callable[[Inputs], Trial]
    small: bool = False


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, memory for results holds NaN, or the smallest integer, until a kernel writes it."""
    allocators: dict[str, Any] = {name: getattr(torch, name) for name in ("empty", "empty_like")}

    def poisoning(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocated(*args: Any, **kwargs: Any) -> Tensor:
            out = allocate(*args, **kwargs)
            return out.fill_(torch.nan if out.dtype.is_floating_point else torch.iinfo(out.dtype).min)

        return allocated

    for name, allocate in allocators.items():
        setattr(torch, name, poisoning(allocate))
    try:
        yield
    finally:
        for name, allocate in allocators.items():
            setattr(torch, name, allocate)
