"""How does an RWKV layer take the new tokens of a sequence, when its matrix of state is read and written once?

RWKV-6: y = r (S + u k^T v), S = diag(w) S + k^T v. Source: Peng et al., Eagle and Finch, 2024, section 4.
RWKV-7: S = diag(w) S + b^T (a S) + k^T v, y = r S. Source: Peng et al., RWKV-7 "Goose", 2025, section 4; a is minus the
normalized removal key, b that key times the in-context learning rate. S is [key, value] in both. Gated DeltaNet (Yang
et al., 2024, section 3.1) is the second with w = g, a = k, b = -beta g k and v times beta.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.launch import configure, launch, machine_for
from membound.kernels.triton.steps import FLOATS, Steps, span_of


@triton.jit
def rwkv_update_kernel(state, slots, query_start, positions, r, w, k, v, first_of, second_of, out, state_stride,
                       HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
                       DELTA: tl.constexpr, BLOCK_V: tl.constexpr):  # fmt: skip
    """Program (sequence, head, BLOCK_V columns of its state). `first_of` is u or a, `second_of` b where DELTA."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + sequence)
    first, end, fresh = span_of(query_start, positions, sequence)
    if (slot < 0) | (first >= end):
        return
    key = tl.arange(0, BLOCK)
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    rows, columns = key < KEY, value < VALUE
    inside = rows[:, None] & columns[None, :]
    at = state + slot * state_stride + (head * KEY + key)[:, None] * VALUE + value[None, :]
    s = tl.load(at, mask=inside & (fresh == 0), other=0.0).to(tl.float32)
    for token in range(first, end):
        of_keys = (token * HEADS + head) * KEY + key
        of_values = (token * HEADS + head) * VALUE + value
        receptance = tl.load(r + of_keys, mask=rows, other=0.0).to(tl.float32)
        decay = tl.load(w + of_keys, mask=rows, other=0.0).to(tl.float32)
        kk = tl.load(k + of_keys, mask=rows, other=0.0).to(tl.float32)
        vv = tl.load(v + of_values, mask=columns, other=0.0).to(tl.float32)
        update = kk[:, None] * vv[None, :]
        if DELTA:
            a = tl.load(first_of + of_keys, mask=rows, other=0.0).to(tl.float32)
            b = tl.load(second_of + of_keys, mask=rows, other=0.0).to(tl.float32)
            removed = tl.sum(a[:, None] * s, 0)
            s = decay[:, None] * s + b[:, None] * removed[None, :] + update
            y = tl.sum(receptance[:, None] * s, 0)
        else:
            bonus = tl.load(first_of + head * KEY + key, mask=rows, other=0.0).to(tl.float32)
            y = tl.sum(receptance[:, None] * (s + bonus[:, None] * update), 0)
            s = decay[:, None] * s + update
        tl.store(out + of_values, y.to(out.dtype.element_ty), mask=columns)
    tl.store(at, s.to(state.dtype.element_ty), mask=inside)


def rwkv6_update(
    state: Tensor,
    slots: Tensor,
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    *,
    steps: Steps | None = None,
) -> Tensor:
    """The new tokens of each sequence through all heads: y as v; `state` changes in place.

    `state` is [slots, heads, key, value] (fp32 or halves); sequence i has slot `slots[i]` (int64), or if that is
    negative none: its y is then 0. It brings the i-th token, or those that `steps` says. r, w (the decay itself, 0 to
    1) and k are [tokens, heads, key], v [tokens, heads, value] in one dtype, u [heads, key] in fp32.
    """
    check.tensor("r", r, [None, None, None], FLOATS)
    check.tensor("u", u, r.shape[1:], [torch.float32], r)
    return _update(state, slots, r, w, k, v, u, None, steps)


def rwkv7_update(
    state: Tensor,
    slots: Tensor,
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    steps: Steps | None = None,
) -> Tensor:
    """As `rwkv6_update`, with the delta rule's a and b [tokens, heads, key] in place of u."""
    check.tensor("r", r, [None, None, None], FLOATS)
    check.tensor("a", a, r.shape, [r.dtype], r)
    check.tensor("b", b, r.shape, [r.dtype], r)
    return _update(state, slots, r, w, k, v, a, b, steps)


def _update(
    state: Tensor,
    slots: Tensor,
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    second: Tensor | None,
    steps: Steps | None,
) -> Tensor:
    tokens, heads, size = r.shape
    check.tensor("v", v, [tokens, heads, None], [r.dtype], r)
    width = v.shape[2]
    check.strided("state", state, [None, heads, size, width], FLOATS, r)
    sequences = Steps.checked(slots, steps, tokens, r)
    for name, value in (("w", w), ("k", k)):
        check.tensor(name, value, r.shape, [r.dtype], r)
    config = configure("rwkv_update", machine_for(r), size=size)
    out = torch.zeros_like(v)
    launch(
        rwkv_update_kernel,
        (sequences, heads, triton.cdiv(width, config.tiles["BLOCK_V"])),
        state,
        slots,
        *Steps.pointers(steps),
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
        KEY=size,
        VALUE=width,
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
    """Bytes that must move in decode: each sequence's state in and out; r, w, k, v, y and a, b (delta) or u once."""
    vectors = 7 * r.nbytes if delta else 5 * r.nbytes + 4 * r[0].numel()
    return 2 * r.shape[0] * state[0].nbytes + vectors
