"""How does an RWKV layer take one more token, when its matrix of state is read and written once?

RWKV-6: y = r (S + u k^T v), S = diag(w) S + k^T v. Source: Peng et al., Eagle and Finch, 2024, section 4.
RWKV-7: S = diag(w) S + b^T (a S) + k^T v, y = r S. Source: Peng et al., RWKV-7 "Goose", 2025, section 4; a is minus the
normalized removal key, b that key times the in-context learning rate. S is [key, value] in both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.launch import configure, launch, machine_for


@triton.jit
def rwkv_update_kernel(state, slots, r, w, k, v, first, second, out, state_stride,
                       HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, DELTA: tl.constexpr,
                       BLOCK_V: tl.constexpr):  # fmt: skip
    """Program (sequence, head, BLOCK_V columns of its state). `first` is u or a, `second` b where DELTA (RWKV-7)."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + sequence)
    if slot < 0:
        return
    key = tl.arange(0, BLOCK)
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    rows, columns = key < SIZE, value < SIZE
    inside = rows[:, None] & columns[None, :]
    at = state + slot * state_stride + (head * SIZE + key)[:, None] * SIZE + value[None, :]
    s = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    token = (sequence * HEADS + head) * SIZE
    receptance = tl.load(r + token + key, mask=rows, other=0.0).to(tl.float32)
    decay = tl.load(w + token + key, mask=rows, other=0.0).to(tl.float32)
    kk = tl.load(k + token + key, mask=rows, other=0.0).to(tl.float32)
    vv = tl.load(v + token + value, mask=columns, other=0.0).to(tl.float32)
    update = kk[:, None] * vv[None, :]
    if DELTA:
        a = tl.load(first + token + key, mask=rows, other=0.0).to(tl.float32)
        b = tl.load(second + token + key, mask=rows, other=0.0).to(tl.float32)
        removed = tl.sum(a[:, None] * s, 0)
        s = decay[:, None] * s + b[:, None] * removed[None, :] + update
        y = tl.sum(receptance[:, None] * s, 0)
    else:
        bonus = tl.load(first + head * SIZE + key, mask=rows, other=0.0).to(tl.float32)
        y = tl.sum(receptance[:, None] * (s + bonus[:, None] * update), 0)
        s = decay[:, None] * s + update
    tl.store(at, s.to(state.dtype.element_ty), mask=inside)
    tl.store(out + token + value, y.to(out.dtype.element_ty), mask=columns)


def rwkv6_update(state: Tensor, slots: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, u: Tensor) -> Tensor:
    """One token of each sequence through all heads: y [sequences, heads, size]; `state` changes in place.

    `state` is [slots, heads, size, size] (fp32 or halves); sequence i has slot `slots[i]` (int64), or if that is
    negative none: its y is then 0. r, w (the decay itself, 0 to 1), k and v are [sequences, heads, size] in one dtype,
    u [heads, size] in fp32.
    """
    check.tensor("r", r, [None, None, None], check.HALVES)
    check.tensor("u", u, r.shape[1:], [torch.float32], r)
    return _update(state, slots, r, w, k, v, u, None)


def rwkv7_update(
    state: Tensor, slots: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor
) -> Tensor:
    """As `rwkv6_update`, with the delta rule's a and b [sequences, heads, size] in place of u."""
    check.tensor("r", r, [None, None, None], check.HALVES)
    check.tensor("a", a, r.shape, [r.dtype], r)
    check.tensor("b", b, r.shape, [r.dtype], r)
    return _update(state, slots, r, w, k, v, a, b)


def _update(
    state: Tensor, slots: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, first: Tensor, second: Tensor | None
) -> Tensor:
    sequences, heads, size = r.shape
    check.strided("state", state, [None, heads, size, size], [torch.float32, *check.HALVES], r)
    check.tensor("slots", slots, [sequences], [torch.int64], r)
    for name, value in (("w", w), ("k", k), ("v", v)):
        check.tensor(name, value, r.shape, [r.dtype], r)
    config = configure("rwkv_update", machine_for(r))
    out = torch.zeros_like(r)
    launch(
        rwkv_update_kernel,
        (sequences, heads, triton.cdiv(size, config.tiles["BLOCK_V"])),
        state,
        slots,
        r,
        w,
        k,
        v,
        first,
        second,
        out,
        state.stride(0),
        config=config,
        HEADS=heads,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        DELTA=second is not None,
    )
    return out


def rwkv6_update_reference(
    state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """y and the new state of sequences whose `state` is [sequences, heads, size, size], in fp32."""
    s, update = state.float(), k.float()[..., None] * v.float()[:, :, None]
    y = torch.einsum("bhk,bhkv->bhv", r.float(), s + u[..., None] * update)
    return y, w.float()[..., None] * s + update


def rwkv7_update_reference(
    state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for RWKV-7."""
    s, update = state.float(), k.float()[..., None] * v.float()[:, :, None]
    removed = torch.einsum("bhk,bhkv->bhv", a.float(), s)
    s = w.float()[..., None] * s + b.float()[..., None] * removed[:, :, None] + update
    return torch.einsum("bhk,bhkv->bhv", r.float(), s), s


def rwkv_update_bytes(state: Tensor, r: Tensor, *, delta: bool) -> int:
    """Bytes that must move: every sequence's state in and out; r, w, k, v, y and a, b (delta) or u once."""
    vectors = 7 * r.nbytes if delta else 5 * r.nbytes + 4 * r[0].numel()
    return 2 * r.shape[0] * state[0].nbytes + vectors
