"""What do the inputs of each linear look like on calibration text?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from membound.runtime.quantization.quantized import QuantizationError


@dataclass(frozen=True)
class InputStatistics:
    """Of the inputs x [tokens, k] of one linear: what calibrated quantizers and pruners need, all in fp32."""

    tokens: int
    mean_abs: Tensor  # [k], mean of |x|
    max_abs: Tensor  # [k], largest |x|
    mean_square: Tensor  # [k], mean of x^2
    second_moments: Tensor | None = None  # [k, k], mean of x x^T

    @property
    def moments(self) -> Tensor:
        """The second moments; raises QuantizationError where they were not collected."""
        if self.second_moments is None:
            raise QuantizationError("these statistics have no second moments, which the method needs; collect them")
        return self.second_moments

    def scaled(self, factors: Tensor) -> InputStatistics:
        """Those of inputs that are multiplied by `factors` [k]."""
        moments = self.second_moments
        return InputStatistics(
            self.tokens,
            self.mean_abs * factors.abs(),
            self.max_abs * factors.abs(),
            self.mean_square * factors.square(),
            None if moments is None else moments * factors[:, None] * factors[None, :],
        )


class Accumulator:
    """Adds up what `InputStatistics` holds over any number of pieces; memory does not grow with tokens."""

    def __init__(self, k: int, device: torch.device, *, moments: bool = True) -> None:
        self.tokens = 0
        self._sum_abs, self._max_abs, self._sum_square = (torch.zeros(k, device=device) for _ in range(3))
        self._moments = torch.zeros(k, k, device=device) if moments else None

    def add(self, x: Tensor) -> None:
        """Inputs [tokens, k] of one call."""
        x = x.float()
        self.tokens += len(x)
        magnitude = x.abs()
        self._sum_abs += magnitude.sum(0)
        self._max_abs = torch.maximum(self._max_abs, magnitude.amax(0)) if len(x) else self._max_abs
        self._sum_square += x.square().sum(0)
        if self._moments is not None:
            self._moments.addmm_(x.T, x)

    def statistics(self) -> InputStatistics:
        """The means so far; raises QuantizationError where there was no token."""
        if not self.tokens:
            raise QuantizationError("a linear saw no token of the calibration text; calibrate on more text")
        moments = None if self._moments is None else self._moments / self.tokens
        return InputStatistics(
            self.tokens, self._sum_abs / self.tokens, self._max_abs, self._sum_square / self.tokens, moments
        )
