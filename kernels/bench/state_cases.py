"""With which states are the layers that keep one checked and timed?"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from membound.kernels.bench.trial import Case, Comparison, Inputs, Trial, recurrent
from membound.kernels.triton.mamba1_update import mamba1_update, mamba1_update_bytes, mamba1_update_reference
from membound.kernels.triton.mamba2_update import mamba2_update, mamba2_update_bytes, mamba2_update_reference
from membound.kernels.triton.rwkv_update import (
    rwkv6_update,
    rwkv6_update_reference,
    rwkv7_update,
    rwkv7_update_reference,
    rwkv_update_bytes,
)
from membound.kernels.triton.short_conv import short_conv, short_conv_bytes, short_conv_reference


def _slots(inputs: Inputs, sequences: int) -> Tensor:
    """Scattered over twice as many; the last sequence has none."""
    slots = inputs.order(2 * sequences)[:sequences]
    slots[-1] = -1
    return slots


def _updated(
    y: Tensor, expected: Tensor, state: Tensor, before: Tensor, new: Tensor, slots: Tensor
) -> list[Comparison]:
    """Of an update in place: y, and the states of all slots, those that must not change included."""
    has = slots >= 0
    before[slots[has]] = new[has].to(before.dtype)
    there = has.view(-1, *[1] * (expected.dim() - 1))
    return [recurrent(y, torch.where(there, expected, 0.0)), recurrent(state, before.float())]


def _mamba1(inputs: Inputs, sequences: int, channels: int, size: int) -> Trial:
    state, slots = inputs.normal(2 * sequences, channels, size, dtype=torch.float32), _slots(inputs, sequences)
    before = state.clone()
    x, z = (inputs.normal(sequences, channels, dtype=torch.float32) for _ in range(2))
    b, c = (inputs.normal(sequences, size, dtype=torch.float32) for _ in range(2))
    dt, a = inputs.uniform(sequences, channels), -inputs.uniform(channels, size)
    vectors = x, dt, b, c, z, a, inputs.normal(channels, dtype=torch.float32)

    def compare(y: Tensor) -> list[Comparison]:
        expected, new = mamba1_update_reference(before[slots.clamp(min=0)], *vectors)
        return _updated(y, expected, state, before, new, slots)

    return Trial(lambda: mamba1_update(state, slots, *vectors), compare, mamba1_update_bytes(state, x))


def _short_conv(inputs: Inputs, sequences: int, channels: int, width: int) -> Trial:
    state, slots = inputs.normal(2 * sequences, width - 1, channels, dtype=torch.float32), _slots(inputs, sequences)
    before = state.clone()
    x, weight = inputs.normal(sequences, channels), inputs.normal(channels, width, dtype=torch.float32)
    bias = inputs.normal(channels, dtype=torch.float32)

    def compare(y: Tensor) -> list[Comparison]:
        expected, new = short_conv_reference(x, before[slots.clamp(min=0)], weight, bias)
        return _updated(y, expected, state, before, new, slots)

    return Trial(lambda: short_conv(x, state, slots, weight, bias), compare, short_conv_bytes(x, state, weight))


def _mamba2(inputs: Inputs, sequences: int, heads: int, head_dim: int, size: int) -> Trial:
    state, slots = inputs.normal(2 * sequences, heads, head_dim, size, dtype=torch.float32), _slots(inputs, sequences)
    before = state.clone()
    x, z = (inputs.normal(sequences, heads, head_dim) for _ in range(2))
    dt, (b, c) = inputs.normal(sequences, heads), (inputs.normal(sequences, 1, size) for _ in range(2))
    dt_bias, d, a = (inputs.normal(heads, dtype=torch.float32) for _ in range(3))
    vectors = dt_bias, -a.abs(), b, c, d, z

    def compare(y: Tensor) -> list[Comparison]:
        expected, new = mamba2_update_reference(before[slots.clamp(min=0)], x, dt, *vectors)
        return _updated(y, expected, state, before, new, slots)

    nbytes = mamba2_update_bytes(state, x, b, gated=True)
    return Trial(lambda: mamba2_update(state, slots, x, dt, *vectors), compare, nbytes)


def _rwkv(inputs: Inputs, sequences: int, heads: int, size: int, *, delta: bool) -> Trial:
    state, slots = inputs.normal(2 * sequences, heads, size, size, dtype=torch.float32), _slots(inputs, sequences)
    before = state.clone()
    r, k, v, a = (inputs.normal(sequences, heads, size) for _ in range(4))
    w, b = (inputs.uniform(sequences, heads, size).bfloat16() for _ in range(2))
    a = torch.nn.functional.normalize(a.float(), dim=-1).bfloat16()
    u = inputs.normal(heads, size, dtype=torch.float32)

    def run() -> Tensor:
        return rwkv7_update(state, slots, r, w, k, v, a, b) if delta else rwkv6_update(state, slots, r, w, k, v, u)

    def compare(y: Tensor) -> list[Comparison]:
        old = before[slots.clamp(min=0)]
        if delta:
            expected, new = rwkv7_update_reference(old, r, w, k, v, a, b)
        else:
            expected, new = rwkv6_update_reference(old, r, w, k, v, u)
        return _updated(y, expected, state, before, new, slots)

    return Trial(run, compare, rwkv_update_bytes(state, r, delta=delta))


CASES = [
    Case("mamba1_update", "4 sequences, 40 channels", partial(_mamba1, sequences=4, channels=40, size=5), True),
    Case("short_conv", "4 sequences, 300 channels", partial(_short_conv, sequences=4, channels=300, width=4), True),
    Case("mamba2_update", "4 sequences, 3 heads", partial(_mamba2, sequences=4, heads=3, head_dim=40, size=16), True),
    Case("rwkv_update", "RWKV-6, 4 sequences", partial(_rwkv, sequences=4, heads=2, size=40, delta=False), True),
    Case("rwkv_update", "RWKV-7, 4 sequences", partial(_rwkv, sequences=4, heads=2, size=40, delta=True), True),
    Case(
        "mamba1_update",
        "64 sequences, 8192 channels of 16",
        partial(_mamba1, sequences=64, channels=8192, size=16),
    ),
    Case("short_conv", "64 sequences, 5376 channels", partial(_short_conv, sequences=64, channels=5376, width=4)),
    Case(
        "mamba2_update",
        "64 sequences, 80 heads of 64x128",
        partial(_mamba2, sequences=64, heads=80, head_dim=64, size=128),
    ),
    Case(
        "rwkv_update",
        "RWKV-7, 64 sequences, 32 heads of 64",
        partial(_rwkv, sequences=64, heads=32, size=64, delta=True),
    ),
]
