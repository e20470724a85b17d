"""What does a dense feed-forward network do with each token?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from torch import Tensor

from membound.kernels.base import Activation, Kernels
from membound.runtime.linear import Linear

Between = Callable[[Tensor], Tensor]
# by the names of config.json
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
    "relu_squared": "relu_squared",
}


def gating(kernels: Kernels, activation: str, limit: float | None = None) -> Between:
    """act(gate) * up of gate_up [tokens, 2 * intermediate], gate first; with `limit` as gpt-oss clamps it."""
    if limit is None and ACTIVATIONS[activation] == "silu":
        return kernels.silu_mul
    return partial(kernels.glu, activation=ACTIVATIONS[activation], limit=limit)


def bending(kernels: Kernels, activation: str) -> Between:
    """act(x) of x [tokens, intermediate]."""
    return partial(kernels.activated, activation=ACTIVATIONS[activation])


class TwoLayers(NamedTuple):
    """A network of a linear layer, what joins or bends its rows, and another linear layer."""

    first: Linear
    between: Between
    second: Linear


class GatedNetwork:
    """down(gate(x) * up(x)), gate and up as one matrix, joined by `gate`."""

    def __init__(self, gate: Between, gate_up: Linear, down: Linear, prefix: str = "") -> None:
        self.gate = gate
        self.gate_up = gate_up
        self.down = down
        self.prefix = prefix

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate(self.gate_up(x)))

    def linears(self) -> Iterator[tuple[str, Linear]]:
        yield f"{self.prefix}gate_up", self.gate_up
        yield f"{self.prefix}down", self.down

    @property
    def layers(self) -> TwoLayers:
        return TwoLayers(self.gate_up, self.gate, self.down)


class DenseNetwork:
    """down(act(up(x)))."""

    def __init__(self, act: Between, up: Linear, down: Linear, prefix: str = "") -> None:
        self.act = act
        self.up = up
        self.down = down
        self.prefix = prefix

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))

    def linears(self) -> Iterator[tuple[str, Linear]]:
        yield f"{self.prefix}up", self.up
        yield f"{self.prefix}down", self.down

    @property
    def layers(self) -> TwoLayers:
        return TwoLayers(self.up, self.act, self.down)
