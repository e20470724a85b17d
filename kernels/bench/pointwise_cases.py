"""With which rows are norms, activations, cache writes, copies and sampling checked and timed?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.bench.trial import BF16_ROUNDING, Case, Comparison, Inputs, Trial, exact
from membound.kernels.triton.activation import ActivationFormat, QuantizedRows
from membound.kernels.triton.block_copy import BlockPools, block_copy_reference
from membound.kernels.triton.head_norm import head_norm, head_norm_bytes, head_norm_reference
from membound.kernels.triton.kv_blocks import KvBlocks, KvFormat
from membound.kernels.triton.latent_store import latent_store, latent_store_bytes, latent_store_reference
from membound.kernels.triton.rms_norm import rms_norm, rms_norm_bytes, rms_norm_reference
from membound.kernels.triton.rope_store import (
    kv_store,
    kv_store_reference,
    rope_reference,
    rope_store,
    rope_store_bytes,
)
from membound.kernels.triton.round_rows import round_rows, round_rows_bytes, round_step
from membound.kernels.triton.silu_mul import silu_mul, silu_mul_bytes, silu_mul_reference
from membound.kernels.triton.verify_sampling import (
    Emitted,
    verify_sampling,
    verify_sampling_bytes,
    verify_sampling_reference,
)

NOISE_BLOCK = 1024
# What a stored number may differ by where a rounding falls on the other side, of keys and values up to about 5:
# e4m3 and bf16 by a step relative to it, int8 and int4 by a step of the largest.
STORED: dict[KvFormat, tuple[float, float]] = {
    "bf16": (BF16_ROUNDING, 1e-3),
    "fp8": (0.13, 0.02),
    "int8": (0.0, 0.06),
    "int4": (0.0, 0.8),
}


def _quantized_or_half(y: Tensor | QuantizedRows, reference: Tensor) -> Comparison:
    """Halves within their rounding; quantized rows within half a step of int8, or half of e4m3's 3 mantissa bits."""
    if isinstance(y, Tensor):
        return Comparison(y, reference, BF16_ROUNDING, 1e-6)
    largest = reference.abs().amax(-1, keepdim=True)
    if y.format == "int8":
        return Comparison(y.dequantized(), reference, 0.0, largest / 127 * 0.51 + 1e-9)
    return Comparison(y.dequantized(), reference, 0.0626, largest * 2.0**-17 + 1e-9)


def _rms_norm(inputs: Inputs, tokens: int, width: int, quantize: ActivationFormat | None) -> Trial:
    x, residual = inputs.normal(tokens, width), inputs.normal(tokens, width)
    gain, before = inputs.normal(width, dtype=torch.float32), residual.clone()

    def run() -> Tensor | QuantizedRows:
        if quantize is None:
            return rms_norm(x, gain, 1e-5, residual=residual)
        return rms_norm(x, gain, 1e-5, residual=residual, quantize=quantize)

    def compare(y: Tensor | QuantizedRows) -> list[Comparison]:
        # The norm is of the sum as it was stored: two roundings of it may differ, what follows may not.
        return [
            Comparison(residual, before.float() + x.float(), BF16_ROUNDING, 1e-6),
            _quantized_or_half(y, rms_norm_reference(residual, gain, 1e-5)),
        ]

    return Trial(run, compare, rms_norm_bytes(x, residual=True, quantized=quantize is not None))


def _head_norm(inputs: Inputs, tokens: int, heads: int, head_dim: int, groups: int) -> Trial:
    """Of heads that lie between others."""
    x, first = inputs.normal(tokens, (heads + 3) * head_dim), 2 * head_dim
    before, gain = x.clone(), inputs.normal(groups, head_dim, dtype=torch.float32)

    def run() -> None:
        x.copy_(before)  # what was normed the last time is normed again
        head_norm(x, first, heads, gain, 1e-6)

    def compare(_: None) -> list[Comparison]:
        return [Comparison(x, head_norm_reference(before, first, heads, gain, 1e-6), BF16_ROUNDING, 1e-6)]

    return Trial(run, compare, head_norm_bytes(x, heads, gain))


def _silu_mul(inputs: Inputs, tokens: int, width: int, quantize: ActivationFormat | None) -> Trial:
    gate_up = inputs.normal(tokens, 2 * width)

    def run() -> Tensor | QuantizedRows:
        return silu_mul(gate_up) if quantize is None else silu_mul(gate_up, quantize=quantize)

    def compare(y: Tensor | QuantizedRows) -> list[Comparison]:
        return [_quantized_or_half(y, silu_mul_reference(gate_up))]

    return Trial(run, compare, silu_mul_bytes(gate_up, quantized=quantize is not None))


def _round_step(inputs: Inputs, tokens: int, width: int, format: ActivationFormat) -> Trial:
    """One scale for all: what is far below the largest number keeps fewer bits, of e4m3 down to its smallest step."""
    x = inputs.normal(tokens, width)

    def compare(rounded: QuantizedRows) -> list[Comparison]:
        whole = QuantizedRows(rounded.format, rounded.data.view(1, -1), rounded.scale)
        return [
            _quantized_or_half(whole, x.float().view(1, -1)),
            Comparison(rounded.scale, _scale(x, format), 1e-6, 0.0),
        ]

    return Trial(lambda: round_step(x, format), compare, x.nbytes + x.numel() + 4)


def _scale(x: Tensor, format: ActivationFormat) -> Tensor:
    return QuantizedRows.of_step(x, format).scale


def _round_rows(inputs: Inputs, tokens: int, width: int, format: ActivationFormat) -> Trial:
    x = inputs.normal(tokens, width)

    def compare(rounded: QuantizedRows) -> list[Comparison]:
        return [_quantized_or_half(rounded, x.float())]

    run = partial(round_rows, x, format)
    return Trial(run, compare, round_rows_bytes(x, QuantizedRows.empty(format, tokens, width, torch.device("meta"))))


def _kv_of(format: KvFormat, blocks: int, heads: int, head_dim: int, inputs: Inputs) -> tuple[KvBlocks, KvBlocks]:
    """What a kernel writes and what its reference does; fp8's scales fit the numbers that are stored."""
    pair = tuple(KvBlocks.zeros(format, blocks, 16, heads, head_dim, inputs.device) for _ in range(2))
    if format == "fp8":
        scale = 0.02 + 0.1 * inputs.uniform(2, heads)
        pair = tuple(KvBlocks(format, kv.k, kv.v, scale) for kv in pair)
    return pair[0], pair[1]


def _same_cache(stored: KvBlocks, expected: KvBlocks) -> list[Comparison]:
    return [
        Comparison(mine, theirs, *STORED[stored.format])
        for mine, theirs in zip(stored.dequantized(), expected.dequantized(), strict=True)
    ]


def _rope_store(inputs: Inputs, format: KvFormat, tokens: int, heads: int, kv_heads: int, head_dim: int) -> Trial:
    """Scattered slots; a token without one is not stored."""
    qkv, positions = inputs.normal(tokens, (heads + 2 * kv_heads) * head_dim), inputs.order(4096)[:tokens]
    angles = 6.28 * inputs.uniform(4096, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    blocks = -(-tokens // 16) + 1
    slots = inputs.order(16 * blocks)[:tokens]
    slots[tokens // 2] = -1
    stored, expected = _kv_of(format, blocks, kv_heads, head_dim, inputs)

    def compare(q: Tensor) -> list[Comparison]:
        by_head = qkv.unflatten(1, (-1, head_dim))
        rotated = rope_reference(by_head, cos, sin, positions)
        kv_store_reference(rotated[:, heads : heads + kv_heads], by_head[:, heads + kv_heads :], slots, expected)
        return [Comparison(q, rotated[:, :heads], BF16_ROUNDING, 1e-3), *_same_cache(stored, expected)]

    run = partial(rope_store, qkv, cos, sin, positions, slots, stored)
    return Trial(run, compare, rope_store_bytes(qkv, stored))


def _kv_store(inputs: Inputs, format: KvFormat, tokens: int, kv_heads: int, head_dim: int) -> Trial:
    k, v = (inputs.normal(tokens, kv_heads, head_dim) for _ in range(2))
    blocks = -(-tokens // 16) + 1
    slots = inputs.order(16 * blocks)[:tokens]
    stored, expected = _kv_of(format, blocks, kv_heads, head_dim, inputs)

    def compare(_: None) -> list[Comparison]:
        kv_store_reference(k, v, slots, expected)
        return _same_cache(stored, expected)

    return Trial(lambda: kv_store(k, v, slots, stored), compare, k.nbytes + v.nbytes + tokens * stored.token_bytes())


def _latent_store(inputs: Inputs, tokens: int, heads: int, nope: int, rank: int, rope: int) -> Trial:
    """Scattered slots; a token without one is not stored."""
    q, latents = inputs.normal(tokens, heads, nope + rope), inputs.normal(tokens, rank + rope)
    norm, positions = inputs.normal(rank, dtype=torch.float32), inputs.order(4096)[:tokens]
    angles = 6.28 * inputs.uniform(4096, rope // 2)
    blocks = -(-tokens // 16) + 1
    slots = inputs.order(16 * blocks)[:tokens]
    slots[tokens // 2] = -1
    cache = torch.zeros(blocks, 16, rank + rope, dtype=torch.bfloat16, device=inputs.device)
    before, expected = q.clone(), cache.clone()
    where = latents, norm, 1e-6, angles.cos(), angles.sin(), positions, slots

    def compare(_: None) -> list[Comparison]:
        latent_store_reference(before, *where, expected)
        return [Comparison(q, before, BF16_ROUNDING, 1e-3), Comparison(cache, expected, BF16_ROUNDING, 1e-3)]

    return Trial(lambda: latent_store(q, *where, cache), compare, latent_store_bytes(q, latents, rank))


def _block_copy(inputs: Inputs, pools: int, blocks: int, pairs: int, shape: Sequence[int]) -> Trial:
    tensors = [inputs.normal(blocks, *shape) for _ in range(pools)]
    expected = [tensor.clone() for tensor in tensors]
    table, together = inputs.order(blocks)[: 2 * pairs].view(pairs, 2), BlockPools(tensors)

    def compare(_: None) -> list[Comparison]:
        block_copy_reference(expected, table)
        return [exact(mine, theirs) for mine, theirs in zip(tensors, expected, strict=True)]

    return Trial(lambda: together.copy(table), compare, together.copy_bytes(pairs))


@triton.jit
def noise_kernel(seed, out, count, BLOCK: tl.constexpr):
    """The uniform numbers that the sampling kernels draw, in order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.rand(tl.load(seed), at), mask=at < count)


def _sampling(inputs: Inputs, sequences: int, most_rows: int, vocab: int, temperature: float) -> Trial:
    """Sequences of 1 to `most_rows` rows, whose drafts are drawn from a distribution near the target's."""
    counts = [1 + i % most_rows for i in range(sequences)]
    starts = inputs.of([sum(counts[:i]) for i in range(sequences + 1)])
    rows = sum(counts)
    logits = 3 * inputs.normal(rows, vocab, dtype=torch.float32)
    q = torch.softmax(logits + 0.5 * inputs.normal(rows, vocab, dtype=torch.float32), -1)
    drafts = q.argmax(-1)
    degrees = torch.full((sequences,), temperature, device=inputs.device)
    seed = inputs.integers(0, 2**40, 1)

    def compare(emitted: Emitted) -> list[Comparison]:
        count = rows + sequences * vocab
        noise = torch.zeros(count, device=inputs.device)
        noise_kernel[(triton.cdiv(count, NOISE_BLOCK),)](seed, noise, count, BLOCK=NOISE_BLOCK)
        tokens = verify_sampling_reference(logits, starts, drafts, degrees, noise, q)
        padded = [row + [-1] * (most_rows - len(row)) for row in tokens]
        return [
            exact(emitted.tokens, inputs.of(padded, torch.int64)),  # type: ignore[arg-type]
            exact(emitted.counts, inputs.of([len(row) for row in tokens])),
        ]

    def run() -> Emitted:
        return verify_sampling(logits, starts, drafts, degrees, seed, most_rows=most_rows, draft_probabilities=q)

    return Trial(run, compare, verify_sampling_bytes(logits, sequences, with_draft_probabilities=True))


FORMATS: tuple[KvFormat, ...] = ("bf16", "fp8", "int8", "int4")
QUANTIZED: tuple[ActivationFormat | None, ...] = (None, "int8", "fp8")
ROUNDED: tuple[ActivationFormat, ...] = ("int8", "fp8")
LARGE_NORMS: tuple[tuple[int, ActivationFormat | None], ...] = ((16, None), (8192, None), (8192, "fp8"))
LARGE_GATES: tuple[tuple[int, ActivationFormat | None], ...] = ((16, None), (8192, None), (8192, "int8"))

CASES = [
    *(
        Case(
            "rms_norm",
            f"9x300 with residual{f' to {f}' if f else ''}",
            partial(_rms_norm, tokens=9, width=300, quantize=f),
            True,
        )
        for f in QUANTIZED
    ),
    Case("head_norm", "9 tokens, 5 heads", partial(_head_norm, tokens=9, heads=5, head_dim=80, groups=2), True),
    Case("head_norm", "64 tokens, 32 heads", partial(_head_norm, tokens=64, heads=32, head_dim=128, groups=1)),
    *(
        Case("silu_mul", f"5x1500{f' to {f}' if f else ''}", partial(_silu_mul, tokens=5, width=1500, quantize=f), True)
        for f in QUANTIZED
    ),
    *(
        Case("round_rows", f"5x1500 to {f}", partial(_round_rows, tokens=5, width=1500, format=f), True)
        for f in ROUNDED
    ),
    *(
        Case("round_step", f"5x1500 to {f}", partial(_round_step, tokens=5, width=1500, format=f), True)
        for f in ROUNDED
    ),
    *(
        Case(
            "rope_store",
            f"{f}, 9 tokens, 6 heads",
            partial(_rope_store, format=f, tokens=9, heads=6, kv_heads=3, head_dim=80),
            True,
        )
        for f in FORMATS
    ),
    *(
        Case("kv_store", f"{f}, 9 tokens", partial(_kv_store, format=f, tokens=9, kv_heads=2, head_dim=64), True)
        for f in FORMATS
    ),
    Case(
        "block_copy",
        "3 of 8 blocks in 2 pools",
        partial(_block_copy, pools=2, blocks=8, pairs=3, shape=(5, 2, 8)),
        True,
    ),
    Case(
        "latent_store", "9 tokens, 3 heads", partial(_latent_store, tokens=9, heads=3, nope=8, rank=48, rope=12), True
    ),
    Case(
        "verify_sampling",
        "greedy, vocabulary 5000",
        partial(_sampling, sequences=5, most_rows=4, vocab=5000, temperature=0.0),
        True,
    ),
    Case(
        "verify_sampling",
        "temperature 0.8, vocabulary 5000",
        partial(_sampling, sequences=5, most_rows=4, vocab=5000, temperature=0.8),
        True,
    ),
    *(
        Case(
            "rms_norm",
            f"{t}x4096 with residual{f' to {f}' if f else ''}",
            partial(_rms_norm, tokens=t, width=4096, quantize=f),
        )
        for t, f in LARGE_NORMS
    ),
    *(
        Case("silu_mul", f"{t}x14336{f' to {f}' if f else ''}", partial(_silu_mul, tokens=t, width=14336, quantize=f))
        for t, f in LARGE_GATES
    ),
    *(
        Case("round_rows", f"{t}x14336 to int8", partial(_round_rows, tokens=t, width=14336, format="int8"))
        for t in (1, 32, 8192)
    ),
    Case("round_step", "8192x14336 to fp8", partial(_round_step, tokens=8192, width=14336, format="fp8")),
    *(
        Case(
            "rope_store",
            f"{f}, 2048 tokens, 32 and 8 heads",
            partial(_rope_store, format=f, tokens=2048, heads=32, kv_heads=8, head_dim=128),
        )
        for f in ("bf16", "int4")
    ),
    Case(
        "block_copy", "64 blocks in 64 pools", partial(_block_copy, pools=64, blocks=256, pairs=64, shape=(16, 8, 128))
    ),
    Case(
        "latent_store",
        "2048 tokens, 128 heads, latents of 512",
        partial(_latent_store, tokens=2048, heads=128, nope=128, rank=512, rope=64),
    ),
    Case(
        "verify_sampling",
        "16 sequences, vocabulary 128256",
        partial(_sampling, sequences=16, most_rows=5, vocab=128256, temperature=0.8),
    ),
]
