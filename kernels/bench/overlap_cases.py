"""Does a layer give the same bits where its launches overlap as where each begins when the one before has ended?

A kernel that reads too early is right wherever it runs alone, so it is looked for in a graph of many launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from membound.kernels.bench.capture import warmed_up
from membound.kernels.bench.trial import Case, Comparison, Inputs, Trial, exact
from membound.kernels.triton.decode_attention import decode_attention, decode_attention_bytes
from membound.kernels.triton.kv_blocks import KvBlocks
from membound.kernels.triton.linear_half import linear_half
from membound.kernels.triton.linear_int4 import Int4Weight, linear_int4
from membound.kernels.triton.overlapping import apart
from membound.kernels.triton.rms_norm import rms_norm
from membound.kernels.triton.rope_store import rope_store
from membound.kernels.triton.silu_mul import silu_mul

BLOCK_SIZE = 16
REPLAYED_LAYERS = 8


def _layer(inputs: Inputs, kv_heads: int, group: int, head_dim: int, context: int) -> Trial:
    """One token through a layer whose feed-forward network is as wide as its states, and has weights of 4 bits."""
    heads, blocks = kv_heads * group, -(-context // BLOCK_SIZE)
    hidden, device = heads * head_dim, inputs.device

    def weight(n: int) -> Tensor:
        return inputs.normal(n, hidden) / hidden**0.5

    qkv, out = weight((heads + 2 * kv_heads) * head_dim), weight(hidden)
    up, down = (Int4Weight.quantize(weight(n), 64, symmetric=True) for n in (2 * hidden, hidden))
    gain, states = inputs.uniform(hidden), inputs.normal(1, hidden)
    kv = KvBlocks("bf16", *(inputs.normal(blocks, BLOCK_SIZE, kv_heads, head_dim) for _ in range(2)))
    cos, sin = (inputs.normal(context, head_dim // 2, dtype=torch.float32) for _ in range(2))
    last = torch.full((1,), context - 1, dtype=torch.int64, device=device)
    length = torch.full((1,), context, dtype=torch.int32, device=device)
    table = torch.arange(blocks, dtype=torch.int32, device=device)[None]

    def layer() -> Tensor:
        residual = states.clone()
        rows = rope_store(linear_half(rms_norm(residual, gain, 1e-5), qkv), cos, sin, last, last, kv)
        attended = linear_half(decode_attention(rows, kv, table, length, head_dim**-0.5).flatten(1), out)
        normed = rms_norm(attended, gain, 1e-5, residual=residual)
        return rms_norm(linear_int4(silu_mul(linear_int4(normed, up)), down), gain, 1e-5, residual=residual)

    def compare(result: Tensor) -> Sequence[Comparison]:
        with apart():
            expected = layer()
        replayed = _replayed(layer) if device.type == "cuda" else []
        return [exact(found, expected) for found in (result, *replayed)]

    weights = qkv.nbytes + out.nbytes + up.nbytes + down.nbytes
    return Trial(layer, compare, weights + decode_attention_bytes(states, kv, [context]))


def _replayed(layer: Callable[[], Tensor]) -> list[Tensor]:
    """The results of layers one behind the other, as a graph."""

    def layers() -> list[Tensor]:
        return [layer() for _ in range(REPLAYED_LAYERS)]

    warmed_up(layers, torch.cuda.Stream())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = layers()
    graph.replay()
    torch.cuda.synchronize()
    return results


CASES = [
    Case("layer", "hidden 128, kv 40", partial(_layer, kv_heads=1, group=2, head_dim=64, context=40), True),
    Case("layer", "hidden 4096, kv 4096", partial(_layer, kv_heads=8, group=4, head_dim=128, context=4096)),
]
