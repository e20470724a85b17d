"""What does a dense feed-forward network do with each token?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from membound.kernels.base import Kernels
from membound.runtime.linear import Linear

Activation = Callable[[Tensor], Tensor]
_TANH_GELU = partial(functional.gelu, approximate="tanh")
# by the names of config.json
ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "relu_squared": lambda x: functional.relu(x).square(),
}
CLAMPED_ALPHA = 1.702  # gpt-oss `config.json`: swiglu_alpha


def gating(kernels: Kernels, activation: str, limit: float | None = None) -> Activation:
    """act(gate) * up of gate_up [tokens, 2 * intermediate], gate first; with `limit` as gpt-oss clamps it."""
    if limit is not None:
        return partial(_clamped, limit=limit)
    if ACTIVATIONS[activation] is functional.silu:
        return kernels.silu_mul
    return partial(_gated, ACTIVATIONS[activation])


class TwoLayers(NamedTuple):
    """A network of a linear layer, what joins or bends its rows, and another linear layer."""

    first: Linear
    between: Activation
    second: Linear


class GatedNetwork:
    """down(gate(x) * up(x)), gate and up as one matrix, joined by `gate`."""

    def __init__(self, gate: Activation, gate_up: Linear, down: Linear, prefix: str = "") -> None:
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

    def __init__(self, act: Activation, up: Linear, down: Linear, prefix: str = "") -> None:
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


def _gated(act: Activation, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return act(gate) * up


def _clamped(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(CLAMPED_ALPHA * gate)
