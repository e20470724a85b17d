"""How are a token's latent and its rotated key put into the cache of MLA, and q rotated, in one pass?

DeepSeek-V2, 2024, section 2.1.3: the latent is RMS-normed, a key that all heads share is rotated beside it, and of each
head's query only the last elements are rotated, which therefore is done in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.launch import configure, launch, machine_for
from membound.kernels.triton.overlap import follow


@triton.jit
def latent_store_kernel(q, latents, norm, cos, sin, positions, slots, cache, eps, latent_stride, cache_stride,
                        HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr,
                        BLOCK_SIZE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_HALF: tl.constexpr,
                        OVERLAP: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    """Program (token, tile): the first tile stores, each of the others rotates BLOCK_H heads of q."""
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    d = tl.arange(0, BLOCK_HALF)
    inside = d < HALF
    position = tl.load(positions + token)
    cosine = tl.load(cos + position * HALF + d, mask=inside, other=0.0)
    sine = tl.load(sin + position * HALF + d, mask=inside, other=0.0)
    if tile > 0:
        head = (tile - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        here = (head < HEADS)[:, None] & inside[None, :]
        at = q + (token * HEADS + head)[:, None] * HEAD_DIM + (HEAD_DIM - 2 * HALF) + d[None, :]
        first = tl.load(at, mask=here, other=0.0).to(tl.float32)
        second = tl.load(at + HALF, mask=here, other=0.0).to(tl.float32)
        tl.store(at, (first * cosine[None, :] - second * sine[None, :]).to(q.dtype.element_ty), mask=here)
        tl.store(at + HALF, (second * cosine[None, :] + first * sine[None, :]).to(q.dtype.element_ty), mask=here)
        return
    slot = tl.load(slots + token)
    if slot < 0:
        return
    to = cache + (slot // BLOCK_SIZE) * cache_stride + (slot % BLOCK_SIZE) * (RANK + 2 * HALF)
    c = tl.arange(0, BLOCK_C)
    row = latents + token * latent_stride
    latent = tl.load(row + c, mask=c < RANK, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
    gain = tl.load(norm + c, mask=c < RANK, other=0.0).to(tl.float32)
    tl.store(to + c, (latent * inverse * gain).to(cache.dtype.element_ty), mask=c < RANK)
    first = tl.load(row + RANK + d, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(row + RANK + HALF + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(to + RANK + d, (first * cosine - second * sine).to(cache.dtype.element_ty), mask=inside)
    tl.store(to + RANK + HALF + d, (second * cosine + first * sine).to(cache.dtype.element_ty), mask=inside)


def latent_store(
    q: Tensor,
    latents: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
) -> None:
    """Rotates the last `rope` elements of q's heads [tokens, heads, nope + rope] in place, and stores the latents.

    Of `latents` [tokens, rank + rope] the first part is normed with `norm` [rank], the rest rotated; both go to
    `slots` (int64, block * block_size + offset; below 0 nowhere) of `cache` [blocks, block_size, rank + rope], dense
    within a block. cos and sin are fp32 tables [positions, rope / 2].
    """
    check.tensor("q", q, [None, None, None], check.HALVES)
    tokens, heads, head_dim = q.shape
    check.tensor("norm", norm, [None], [torch.float32, *check.HALVES], q)
    rank = norm.shape[0]
    check.tensor("cos", cos, [None, None], [torch.float32], q)
    check.tensor("sin", sin, cos.shape, [torch.float32], q)
    half = cos.shape[1]
    check.require(0 < 2 * half <= head_dim, "cos", f"rotates {2 * half} elements, q's heads have {head_dim}")
    check.strided("latents", latents, [tokens, rank + 2 * half], [q.dtype], q)
    check.strided("cache", cache, [None, None, rank + 2 * half], check.HALVES, q)
    check.tensor("positions", positions, [tokens], [torch.int64], q)
    check.tensor("slots", slots, [tokens], [torch.int64], q)
    config = configure("latent_store", machine_for(q))
    launch(
        latent_store_kernel,
        (tokens, 1 + triton.cdiv(heads, config.tiles["BLOCK_H"])),
        q,
        latents,
        norm,
        cos,
        sin,
        positions,
        slots,
        cache,
        eps,
        latents.stride(0),
        cache.stride(0),
        config=config,
        HEADS=heads,
        HEAD_DIM=head_dim,
        RANK=rank,
        HALF=half,
        BLOCK_SIZE=cache.shape[1],
        BLOCK_C=triton.next_power_of_2(rank),
        BLOCK_HALF=triton.next_power_of_2(half),
    )


def latent_store_reference(
    q: Tensor,
    latents: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
) -> None:
    """The same in fp32, token by token."""
    rank, half = norm.shape[0], cos.shape[1]
    for token, slot in enumerate(slots.tolist()):
        c, s = cos[positions[token]], sin[positions[token]]

        def turned(x: Tensor, c: Tensor = c, s: Tensor = s) -> Tensor:
            first, second = x.float().split(half, dim=-1)
            return torch.cat([first * c - second * s, second * c + first * s], dim=-1)

        q[token, :, -2 * half :] = turned(q[token, :, -2 * half :]).to(q.dtype)
        if slot >= 0:
            latent = latents[token, :rank].float()
            normed = latent * torch.rsqrt(latent.square().mean() + eps) * norm.float()
            kept = torch.cat([normed, turned(latents[token, rank:])])
            cache[slot // cache.shape[1], slot % cache.shape[1]] = kept.to(cache.dtype)


def latent_store_bytes(q: Tensor, latents: Tensor, rank: int) -> int:
    """Bytes that must move: the latents in and into the cache, the rotated part of q in and out, cos and sin."""
    tokens, heads, _ = q.shape
    rope = latents.shape[1] - rank
    return 2 * latents.nbytes + 2 * tokens * heads * rope * q.itemsize + 4 * tokens * rope + 4 * rank
