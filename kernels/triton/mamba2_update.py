"""How does a Mamba-2 layer take one more token, when its state is read and written once?

For each head: h = exp(dt A) h + dt x B^T, y = h C + D x. Source: Dao and Gu, Transformers are SSMs, 2024, section 7
(the recurrent form of SSD), with dt = softplus(dt + bias) and the gate y * silu(z) as in its reference model.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from membound.kernels.triton import check
from membound.kernels.triton.launch import configure, launch, machine_for


@triton.jit
def mamba2_update_kernel(state, slots, x, dt, dt_bias, a, b, c, d, z, out, state_stride,
                         HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
                         BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr):  # fmt: skip
    """Program (sequence, head, BLOCK_P of its rows)."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + sequence)
    if slot < 0:
        return
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_S)
    row, column = p < HEAD_DIM, n < STATE
    inside = row[:, None] & column[None, :]
    at = state + slot * state_stride + (head * HEAD_DIM + p)[:, None] * STATE + n[None, :]
    h = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    step = tl.load(dt + sequence * HEADS + head).to(tl.float32) + tl.load(dt_bias + head)
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    token = (sequence * HEADS + head) * HEAD_DIM + p
    value = tl.load(x + token, mask=row, other=0.0).to(tl.float32)
    group = (sequence * GROUPS + head // (HEADS // GROUPS)) * STATE + n
    key = tl.load(b + group, mask=column, other=0.0).to(tl.float32)
    query = tl.load(c + group, mask=column, other=0.0).to(tl.float32)
    h = h * tl.exp(step * tl.load(a + head)) + (step * value)[:, None] * key[None, :]
    tl.store(at, h.to(state.dtype.element_ty), mask=inside)
    y = tl.sum(h * query[None, :], 1) + tl.load(d + head) * value
    if z is not None:
        gate = tl.load(z + token, mask=row, other=0.0).to(tl.float32)
        y *= gate * tl.sigmoid(gate)
    tl.store(out + token, y.to(out.dtype.element_ty), mask=row)


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
) -> Tensor:
    """One token of each sequence through all heads: y [sequences, heads, head_dim]; `state` changes in place.

    `state` is [slots, heads, head_dim, state] (fp32 or halves); sequence i has slot `slots[i]` (int64), or if that is
    negative none: its y is then 0. x and z are [sequences, heads, head_dim], dt [sequences, heads], b and c
    [sequences, groups, state], all in x's dtype; dt_bias, a (negative) and d are [heads] in fp32.
    """
    check.tensor("x", x, [None, None, None], check.HALVES)
    sequences, heads, head_dim = x.shape
    check.strided("state", state, [None, heads, head_dim, None], [torch.float32, *check.HALVES], x)
    size = state.shape[3]
    check.tensor("slots", slots, [sequences], [torch.int64], x)
    check.tensor("dt", dt, [sequences, heads], [x.dtype], x)
    check.tensor("b", b, [sequences, None, size], [x.dtype], x)
    groups = b.shape[1]
    check.require(groups > 0 and heads % groups == 0, "b", f"{heads} heads are not shared evenly by {groups} groups")
    check.tensor("c", c, b.shape, [x.dtype], x)
    for name, value in (("dt_bias", dt_bias), ("a", a), ("d", d)):
        check.tensor(name, value, [heads], [torch.float32], x)
    if z is not None:
        check.tensor("z", z, x.shape, [x.dtype], x)
    config = configure("mamba2_update", machine_for(x))
    out = torch.zeros_like(x)
    launch(
        mamba2_update_kernel,
        (sequences, heads, triton.cdiv(head_dim, config.tiles["BLOCK_P"])),
        state,
        slots,
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
