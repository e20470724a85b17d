"""How does a Mamba-2 layer take the new tokens of a sequence, when its state is read and written once?

For each head: h = exp(dt A) h + dt x B^T, y = h C + D x. Source: Dao and Gu, Transformers are SSMs, 2024, section 7
(the recurrent form of SSD), with dt = softplus(dt + bias) and the gate y * silu(z) as in its reference model. A program
keeps its part of the state in registers, however many tokens its sequence brings.
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
def mamba2_update_kernel(state, slots, query_start, positions, x, dt, dt_bias, a, b, c, d, z, out, state_stride,
                         x_stride, dt_stride, b_stride, c_stride, z_stride,
                         HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
                         BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr):  # fmt: skip
    """Program (sequence, head, BLOCK_P of its rows)."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + sequence)
    first, end, fresh = span_of(query_start, positions, sequence)
    if (slot < 0) | (first >= end):
        return
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_S)
    row, column = p < HEAD_DIM, n < STATE
    inside = row[:, None] & column[None, :]
    at = state + slot * state_stride + (head * HEAD_DIM + p)[:, None] * STATE + n[None, :]
    h = tl.load(at, mask=inside & (fresh == 0), other=0.0).to(tl.float32)
    bias, rate, skip = tl.load(dt_bias + head), tl.load(a + head), tl.load(d + head)
    group = head // (HEADS // GROUPS) * STATE + n
    element = head * HEAD_DIM + p
    for token in range(first, end):
        step = tl.load(dt + token * dt_stride + head).to(tl.float32) + bias
        step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
        value = tl.load(x + token * x_stride + element, mask=row, other=0.0).to(tl.float32)
        key = tl.load(b + token * b_stride + group, mask=column, other=0.0).to(tl.float32)
        query = tl.load(c + token * c_stride + group, mask=column, other=0.0).to(tl.float32)
        h = h * tl.exp(step * rate) + (step * value)[:, None] * key[None, :]
        y = tl.sum(h * query[None, :], 1) + skip * value
        if z is not None:
            gate = tl.load(z + token * z_stride + element, mask=row, other=0.0).to(tl.float32)
            y *= gate * tl.sigmoid(gate)
        tl.store(out + token * (HEADS * HEAD_DIM) + element, y.to(out.dtype.element_ty), mask=row)
    tl.store(at, h.to(state.dtype.element_ty), mask=inside)


def mamba2_update(
    state: Tensor,
    slots: Tensor,
    x: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    z: Tensor | None = None,
    *,
    steps: Steps | None = None,
) -> Tensor:
    """The new tokens of each sequence through all heads: y [tokens, heads, head_dim]; `state` changes in place.

    `state` is [slots, heads, head_dim, state] (fp32 or halves); sequence i has slot `slots[i]` (int64), or if that is
    negative none: its y is then 0. It brings the i-th token, or those that `steps` says. x and z are [tokens, heads,
    head_dim], dt [tokens, heads], b and c [tokens, groups, state], whose first dimensions may have gaps; dt_bias, a
    (negative) and d are [heads] in fp32. y is in x's dtype.
    """
    check.strided("x", x, [None, None, None], FLOATS)
    tokens, heads, head_dim = x.shape
    check.strided("state", state, [None, heads, head_dim, None], FLOATS, x)
    size = state.shape[3]
    sequences = Steps.checked(slots, steps, tokens, x)
    check.strided("dt", dt, [tokens, heads], FLOATS, x)
    check.strided("b", b, [tokens, None, size], FLOATS, x)
    groups = b.shape[1]
    check.require(groups > 0 and heads % groups == 0, "b", f"{heads} heads are not shared evenly by {groups} groups")
    check.strided("c", c, b.shape, FLOATS, x)
    for name, value in (("dt_bias", dt_bias), ("a", a), ("d", d)):
        check.tensor(name, value, [heads], [torch.float32], x)
    if z is not None:
        check.strided("z", z, x.shape, FLOATS, x)
    config = configure("mamba2_update", machine_for(x))
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    launch(
        mamba2_update_kernel,
        (sequences, heads, triton.cdiv(head_dim, config.tiles["BLOCK_P"])),
        state,
        slots,
        *Steps.pointers(steps),
        x,
        dt,
        dt_bias,
        a,
        b,
        c,
        d,
        z,
        out,
        state.stride(0),
        *(0 if part is None else part.stride(0) for part in (x, dt, b, c, z)),
        config=config,
        HEADS=heads,
        GROUPS=groups,
        HEAD_DIM=head_dim,
        STATE=size,
        BLOCK_S=triton.next_power_of_2(size),
    )
    return out


def mamba2_update_reference(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    z: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y and the new state of sequences whose `state` is [sequences, heads, head_dim, state], in fp32."""
    shared = x.shape[1] // b.shape[1]
    key, query = (t.float().repeat_interleave(shared, dim=1) for t in (b, c))  # [B, heads, state]
    step = functional.softplus(dt.float() + dt_bias)  # [B, heads]
    decay = torch.exp(step * a)[..., None, None]
    new = state.float() * decay + (step[..., None] * x.float())[..., None] * key[:, :, None]
    y = torch.einsum("bhpn,bhn->bhp", new, query) + d[:, None] * x.float()
    return (y if z is None else y * functional.silu(z.float())), new


def mamba2_update_bytes(state: Tensor, x: Tensor, b: Tensor, *, gated: bool) -> int:
    """Bytes that must move: every sequence's state in and out, x, y, dt, b, c and perhaps z once."""
    sequences, heads, _ = x.shape
    small = sequences * heads * x.itemsize + 2 * b.nbytes + 3 * 4 * heads
    return 2 * sequences * state[0].nbytes + (3 if gated else 2) * x.nbytes + small
