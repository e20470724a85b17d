"""How are q and k rotated and k and v put into the paged cache, quantized or not, in one pass over the projection?

A program holds some heads of one token as two halves, which are the pairs that rotate together (rotate-half) and the
two nibbles of an int4 byte. Without rotation and q it is the plain way of storing k and v.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.kv_blocks import PER_TOKEN, SCALE_DTYPE, KvBlocks
from membound.kernels.triton.lang import fp8_from
from membound.kernels.triton.launch import configure, launch, machine_for
from membound.kernels.triton.overlap import follow


@triton.jit
def store_heads(base, scales, low, high, head, mask, block, offset, block_stride, PART: tl.constexpr,
                FORMAT: tl.constexpr, HALF: tl.constexpr, KV_HEADS: tl.constexpr, META: tl.constexpr,
                BLOCK_SIZE: tl.constexpr, BLOCK_HALF: tl.constexpr):  # fmt: skip
    """Writes one token's vectors (low, high) [H, BLOCK_HALF], fp32, of KV heads `head` [H] where `mask` [H]."""
    STORED: tl.constexpr = HALF if FORMAT == "int4" else 2 * HALF
    d = tl.arange(0, BLOCK_HALF)[None, :]
    inside = mask[:, None] & (d < HALF)
    at = base + block * block_stride + (offset * KV_HEADS + head)[:, None] * STORED + d
    # A token's metadata lie together: of k (PART 0) in their first half, of v (PART 1) in their second.
    meta = scales + ((block * KV_HEADS + head) * BLOCK_SIZE + offset) * META + PART * (META // 2)
    if FORMAT == "fp8":
        scale = tl.load(scales + PART * KV_HEADS + head, mask=mask, other=1.0)[:, None]
        tl.store(at, fp8_from(low / scale), mask=inside)
        tl.store(at + HALF, fp8_from(high / scale), mask=inside)
    elif FORMAT == "int8":
        largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)
        rounded = (largest / 127.0).to(tl.float16)  # what attention will read is what q is of
        tl.store(meta, rounded, mask=mask)
        scale = rounded.to(tl.float32)
        scale = tl.where(scale > 0.0, scale, 1.0)[:, None]
        tl.store(at, signed_byte(low / scale), mask=inside)
        tl.store(at + HALF, signed_byte(high / scale), mask=inside)
    elif FORMAT == "int4":
        real = d < HALF
        smallest = tl.min(tl.where(real, tl.minimum(low, high), float("inf")), 1).to(tl.float16)
        largest = tl.max(tl.where(real, tl.maximum(low, high), float("-inf")), 1)
        minimum = smallest.to(tl.float32)
        rounded = (tl.maximum(largest - minimum, 0.0) / 15.0).to(tl.float16)
        tl.store(meta, rounded, mask=mask)
        tl.store(meta + 1, smallest, mask=mask)
        scale = rounded.to(tl.float32)
        scale = tl.where(scale > 0.0, scale, 1.0)[:, None]
        byte = nibble((low - minimum[:, None]) / scale) | (nibble((high - minimum[:, None]) / scale) << 4)
        tl.store(at, byte.to(tl.uint8), mask=inside)
    else:
        tl.store(at, low.to(base.dtype.element_ty), mask=inside)
        tl.store(at + HALF, high.to(base.dtype.element_ty), mask=inside)


@triton.jit
def signed_byte(number):
    """fp32 rounded into -127 to 127."""
    return tl.minimum(tl.maximum(tl.floor(number + 0.5), -127.0), 127.0).to(tl.int8)


@triton.jit
def nibble(number):
    """fp32 rounded into 0 to 15."""
    return tl.minimum(tl.maximum(tl.floor(number + 0.5), 0.0), 15.0).to(tl.int32)


@triton.jit
def rope_store_kernel(q, k, v, cos, sin, positions, slots, out, k_blocks, v_blocks, scales,
                      q_stride, k_row_stride, v_row_stride, k_stride, v_stride,
                      HEADS: tl.constexpr, ROTATE: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
                      META: tl.constexpr, BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr, WIDEN: tl.constexpr,
                      OVERLAP: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    """Program (token, BLOCK_H heads of q or of k or of v)."""
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    Q_TILES: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    KV_TILES: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    d = tl.arange(0, BLOCK_HALF)[None, :]
    in_head = d < HALF
    lane = tl.arange(0, BLOCK_H)
    cosine = tl.full([1, BLOCK_HALF], 1.0, tl.float32)
    sine = tl.zeros([1, BLOCK_HALF], tl.float32)
    if ROTATE:
        position = tl.load(positions + token)
        cosine = tl.load(cos + position * HALF + d, mask=in_head, other=0.0)
        sine = tl.load(sin + position * HALF + d, mask=in_head, other=0.0)
    if HEADS > 0:  # noqa: SIM102 -- decided by the compiler: without q there is nothing to point at
        if tile < Q_TILES:
            head = tile * BLOCK_H + lane
            at = q + token * q_stride + head[:, None] * (2 * HALF) + d
            inside = (head < HEADS)[:, None] & in_head
            first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
            to = out + (token * HEADS + head)[:, None] * (2 * HALF) + d
            tl.store(to, (first * cosine - second * sine).to(out.dtype.element_ty), mask=inside)
            tl.store(to + HALF, (second * cosine + first * sine).to(out.dtype.element_ty), mask=inside)
            return
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    head = ((tile - Q_TILES) % KV_TILES) * BLOCK_H + lane
    mask = head < KV_HEADS
    inside = mask[:, None] & in_head
    if tile < Q_TILES + KV_TILES:
        at = k + token * k_row_stride + head[:, None] * (2 * HALF) + d
        first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
        low, high = first * cosine - second * sine, second * cosine + first * sine
        store_heads(k_blocks, scales, low, high, head, mask, block, offset, k_stride, 0,
                    FORMAT, HALF, KV_HEADS, META, BLOCK_SIZE, BLOCK_HALF)  # fmt: skip
    else:
        at = v + token * v_row_stride + head[:, None] * (2 * HALF) + d
        low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
        store_heads(v_blocks, scales, low, high, head, mask, block, offset, v_stride, 1,
                    FORMAT, HALF, KV_HEADS, META, BLOCK_SIZE, BLOCK_HALF)  # fmt: skip


def rope_store(qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, kv: KvBlocks) -> Tensor:
    """Rotates q and k, stores k and v into `kv` at `slots`, returns q [tokens, heads, head_dim].

    qkv is [tokens, (heads + 2 * kv_heads) * head_dim]; cos and sin are fp32 tables [positions, head_dim / 2]; slots
    (int64, block * block_size + offset) below 0 are not stored: a padded token.
    """
    check.strided("qkv", qkv, [None, None], check.HALVES)
    tokens, width = qkv.shape
    head_dim = kv.head_dim
    kv.check(head_dim, qkv)
    heads = width // head_dim - 2 * kv.kv_heads
    check.require(
        heads > 0 and width % head_dim == 0,
        "qkv",
        f"{width} columns hold no q beside k and v of {kv.kv_heads} heads of {head_dim}",
    )
    check.tensor("cos", cos, [None, head_dim // 2], [torch.float32], qkv)
    check.tensor("sin", sin, cos.shape, [torch.float32], qkv)
    check.tensor("positions", positions, [tokens], [torch.int64], qkv)
    check.tensor("slots", slots, [tokens], [torch.int64], qkv)
    q, k, v = qkv.split([heads * head_dim, kv.kv_heads * head_dim, kv.kv_heads * head_dim], dim=1)
    out = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    _launch(q, k, v, (cos, sin, positions), slots, out, kv)
    return out


def kv_store(k: Tensor, v: Tensor, slots: Tensor, kv: KvBlocks) -> None:
    """Stores k and v [tokens, kv_heads, head_dim], as they are, into `kv` at `slots`; slots below 0 are not stored."""
    tokens = k.shape[0]
    kv.check(kv.head_dim, k)
    check.strided("k", k, [tokens, kv.kv_heads, kv.head_dim], check.HALVES)
    check.strided("v", v, k.shape, [k.dtype], k)
    check.tensor("slots", slots, [tokens], [torch.int64], k)
    _launch(None, k.flatten(1), v.flatten(1), None, slots, None, kv)


def _launch(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    rotation: tuple[Tensor, Tensor, Tensor] | None,
    slots: Tensor,
    out: Tensor | None,
    kv: KvBlocks,
) -> None:
    machine = machine_for(k)
    config = configure("rope_store", machine)
    heads = 0 if out is None else out.shape[1]
    tiles = [triton.cdiv(count, config.tiles["BLOCK_H"]) for count in (heads, kv.kv_heads, kv.kv_heads)]
    launch(
        rope_store_kernel,
        (k.shape[0], sum(tiles)),
        q,
        k,
        v,
        *(rotation or (None, None, None)),
        slots,
        out,
        kv.k,
        kv.v,
        kv.k if kv.scales is None else kv.scales,
        0 if q is None else q.stride(0),
        k.stride(0),
        v.stride(0),
        *kv.strides,
        config=config,
        HEADS=heads,
        ROTATE=rotation is not None,
        **kv.constants(machine),
        META=PER_TOKEN[kv.format],
    )


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """x [tokens, heads, head_dim] rotated in fp32: pairs (i, i + head_dim / 2) by angle i of the token's position."""
    first, second = x.float().chunk(2, dim=-1)
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1)


def kv_store_reference(k: Tensor, v: Tensor, slots: Tensor, kv: KvBlocks) -> None:
    """Stores fp32 k and v [tokens, kv_heads, head_dim] at `slots`, quantized as `kv` says."""
    for part, (values, blocks) in enumerate(((k, kv.k), (v, kv.v))):
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            block, offset = divmod(slot, kv.block_size)
            x = values[token].float()  # [kv_heads, head_dim]
            if kv.scales is None:
                blocks[block, offset] = x.to(blocks.dtype)
            elif kv.format == "fp8":
                scaled = (x / kv.scales[part, :, None]).clamp(-448, 448)
                blocks[block, offset] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
            elif kv.format == "int8":
                scale = (x.abs().amax(-1) / 127).to(SCALE_DTYPE)
                kv.scales[block, :, offset, part] = scale
                divisor = torch.where(scale > 0, scale.float(), 1.0)[:, None]
                blocks[block, offset] = (x / divisor + 0.5).floor().clamp(-127, 127).to(torch.int8)
            else:
                minimum = x.amin(-1).to(SCALE_DTYPE)
                scale = ((x.amax(-1) - minimum.float()).clamp(min=0) / 15).to(SCALE_DTYPE)
                kv.scales[block, :, offset, 2 * part : 2 * part + 2] = torch.stack([scale, minimum], dim=-1)
                divisor = torch.where(scale > 0, scale.float(), 1.0)[:, None]
                q = ((x - minimum.float()[:, None]) / divisor + 0.5).floor().clamp(0, 15).to(torch.uint8)
                low, high = q.chunk(2, dim=-1)
                blocks[block, offset] = low | (high << 4)


def rope_store_bytes(qkv: Tensor, kv: KvBlocks) -> int:
    """Bytes that must move: the projection in; q out; k and v out as the cache stores them; a row of cos and of sin."""
    tokens = qkv.shape[0]
    q_bytes = qkv.nbytes - 2 * tokens * kv.kv_heads * kv.head_dim * qkv.itemsize
    return qkv.nbytes + q_bytes + tokens * (kv.token_bytes() + 4 * kv.head_dim)
