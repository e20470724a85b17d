"""How does a Mamba layer take the new tokens of a sequence, when its state is read and written once?

For each channel: h = exp(dt A) h + dt x B, y = h C + D x, times silu(z). Source: Gu and Dao, Mamba, 2023, section 3.2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from membound.kernels.triton import check
from membound.kernels.triton.launch import configure, launch, machine_for
from membound.kernels.triton.steps import FLOATS, Steps, span_of


@triton.jit
def mamba1_update_kernel(state, slots, query_start, positions, x, dt, b, c, z, a, d, out, state_stride,
                         x_stride, dt_stride, b_stride, c_stride, z_stride, channels,
                         STATE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """Program (sequence, BLOCK_C channels)."""
    sequence = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + sequence)
    first, end, fresh = span_of(query_start, positions, sequence)
    if (slot < 0) | (first >= end):
        return
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.arange(0, BLOCK_S)
    row, column = channel < channels, n < STATE
    inside = row[:, None] & column[None, :]
    place = channel[:, None] * STATE + n[None, :]
    h = tl.load(state + slot * state_stride + place, mask=inside & (fresh == 0), other=0.0)
    rate = tl.load(a + place, mask=inside, other=0.0)
    skip = tl.load(d + channel, mask=row, other=0.0)
    for token in range(first, end):
        value = tl.load(x + token * x_stride + channel, mask=row, other=0.0).to(tl.float32)
        step = tl.load(dt + token * dt_stride + channel, mask=row, other=0.0).to(tl.float32)
        key = tl.load(b + token * b_stride + n, mask=column, other=0.0).to(tl.float32)
        query = tl.load(c + token * c_stride + n, mask=column, other=0.0).to(tl.float32)
        h = h * tl.exp(step[:, None] * rate) + (step * value)[:, None] * key[None, :]
        gate = tl.load(z + token * z_stride + channel, mask=row, other=0.0).to(tl.float32)
        y = (tl.sum(h * query[None, :], 1) + skip * value) * gate * tl.sigmoid(gate)
        tl.store(out + token * channels + channel, y, mask=row)
    tl.store(state + slot * state_stride + place, h, mask=inside)


def mamba1_update(
    state: Tensor,
    slots: Tensor,
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    z: Tensor,
    a: Tensor,
    d: Tensor,
    *,
    steps: Steps | None = None,
) -> Tensor:
    """The new tokens of each sequence: y [tokens, channels] in fp32; `state` changes in place.

    `state` is [slots, channels, state] (fp32); sequence i has slot `slots[i]` (int64), or if that is negative none: its
    y is then 0. It brings the i-th token, or those that `steps` says. x, dt (positive) and z are [tokens, channels], b
    and c [tokens, state], whose first dimensions may have gaps; a [channels, state] (negative) and d [channels] fp32.
    """
    check.strided("x", x, [None, None], FLOATS)
    tokens, channels = x.shape
    check.strided("state", state, [None, channels, None], [torch.float32], x)
    size = state.shape[2]
    for name, value, width in (("dt", dt, channels), ("z", z, channels), ("b", b, size), ("c", c, size)):
        check.strided(name, value, [tokens, width], FLOATS, x)
    check.tensor("a", a, [channels, size], [torch.float32], x)
    check.tensor("d", d, [channels], [torch.float32], x)
    sequences = Steps.checked(slots, steps, tokens, x)
    config = configure("mamba1_update", machine_for(x))
    out = torch.zeros(tokens, channels, dtype=torch.float32, device=x.device)
    launch(
        mamba1_update_kernel,
        (sequences, triton.cdiv(channels, config.tiles["BLOCK_C"])),
        state,
        slots,
        *Steps.pointers(steps),
        x,
        dt,
        b,
        c,
        z,
        a,
        d,
        out,
        state.stride(0),
        *(part.stride(0) for part in (x, dt, b, c, z)),
        channels,
        config=config,
        STATE=size,
        BLOCK_S=triton.next_power_of_2(size),
    )
    return out


def mamba1_update_reference(
    state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, z: Tensor, a: Tensor, d: Tensor
) -> tuple[Tensor, Tensor]:
    """y and the new state of sequences that bring one token each, whose `state` is [sequences, channels, state]."""
    x, dt, b, c, z = (part.float() for part in (x, dt, b, c, z))
    new = state * torch.exp(dt[..., None] * a) + (dt * x)[..., None] * b[:, None]
    return (torch.einsum("scn,sn->sc", new, c) + d * x) * functional.silu(z), new


def mamba1_update_bytes(state: Tensor, x: Tensor) -> int:
    """Bytes that must move in decode: each sequence's state in and out, x, dt, z, y, b and c, and a and d once."""
    sequences, channels = x.shape
    vectors = 3 * x.nbytes + 4 * x.numel() + 2 * sequences * state.shape[2] * x.itemsize
    return 2 * sequences * state[0].nbytes + vectors + 4 * channels * (state.shape[2] + 1)
