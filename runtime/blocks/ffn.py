"""What does a dense feed-forward network do with each token?"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from membound.kernels.base import Kernels
from membound.runtime.linear import Linear


class GatedNetwork:
    """down(silu(gate(x)) * up(x)), gate and up as one matrix."""

    def __init__(self, kernels: Kernels, gate_up: Linear, down: Linear) -> None:
        self.kernels = kernels
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.kernels.silu_mul(self.gate_up(x)))

    def linears(self) -> Iterator[tuple[str, Linear]]:
        yield "gate_up", self.gate_up
        yield "down", self.down
