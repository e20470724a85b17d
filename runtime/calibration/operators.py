"""What do the operators around the linears cost: norms, rotation, activation, embedding and attention?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from torch import Tensor

from membound.kernels.base import Kernels, RaggedBatch
from membound.kernels.kv_formats import KV_DTYPES, KvQuantFormat, QuantizedKv
from membound.roofline.hardware.calibration import LinearCost, attention_over
from membound.roofline.shape import StepShape
from membound.runtime.calibration.pool import Pool
from membound.runtime.calibration.stopwatch import Call, Stopwatch

SAMPLES = 24
BLOCK_SIZE = 16
EPS = 1e-5
STREAMED_BYTES = 2**20  # of the weight that is read between two samples: that of a small model, to whom these matter
STREAMED_ROWS = 1024
KV_BYTES = 2**28
# What attention over quantized K and V is called in a calibration.
KV_KINDS: dict[str, KvQuantFormat] = {attention_over(format): format for format in KV_DTYPES}


@dataclass(frozen=True)
class Heads:
    """An attention's shape: query heads, key-value heads and the width of one."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Load:
    """`sequences` equal ones that each bring `new` tokens and then have `context`."""

    sequences: int
    context: int
    new: int = 1


@dataclass(frozen=True)
class OperatorGrid:
    """The sizes to measure and the seconds to spend on each; those with more than `most` of anything are left out."""

    tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    widths: tuple[int, ...] = (512, 2048, 8192)
    # Heads in groups of 1, 2, 3, 4 and 8: what a byte of K and V costs goes by how many heads of q read it.
    heads: tuple[Heads, ...] = (
        Heads(8, 8, 64),
        Heads(8, 4, 64),
        Heads(6, 2, 64),
        Heads(32, 8, 64),
        Heads(16, 4, 128),
        Heads(16, 2, 128),
    )
    loads: tuple[Load, ...] = (
        *(
            Load(sequences, context)
            for sequences in (1, 2, 4, 8, 16, 32)
            for context in (64, 128, 256, 512, 1024, 2048)
        ),
        *(Load(sequences, context, 5) for sequences in (1, 4, 16) for context in (128, 512, 1024)),
        *(Load(1, new, new) for new in (32, 64, 128, 256, 512)),
        *(Load(4, new, new) for new in (32, 128)),
    )
    cell_s: float = 1.5e-3
    most_elements: int = 2**20
    most_kv_bytes: int = 2**26
    most_attention_flops: float = 2e9


class OperatorProbe:
    """Measures the operators of a grid; a pass takes each size once."""

    def __init__(self, kernels: Kernels, stopwatch: Stopwatch, pool: Pool, grid: OperatorGrid) -> None:
        self.kernels = kernels
        self.stopwatch = stopwatch
        self.pool = pool
        self.grid = grid
        self.device = stopwatch.device
        self.kv_pool = pool.first(KV_BYTES)

    def amounts(self, kind: str) -> list[dict[str, float]]:
        """What each measured size of a kind of operator comes to, in the terms of its cost."""
        if kind.startswith("attention"):
            width, kv_bits = self.kernels.activation_dtype.itemsize, self._kv_bits(kind)
            return [attention_amounts(heads, load, width, kv_bits(heads)) for heads, load in self._attentions()]
        return [{"elements": float(tokens * width)} for tokens, width in self._sizes()]

    def measure(self, kind: str) -> Iterator[float]:
        """Seconds of one call at each size, in the order of `amounts`."""
        if kind.startswith("attention"):
            for heads, load in self._attentions():
                yield self.attention_s(heads, load, kind)
        else:
            for tokens, width in self._sizes():
                yield self._pointwise_s(kind, tokens, width)

    def attention_s(self, heads: Heads, load: Load, kind: str = "attention") -> float:
        """Seconds of one layer's attention, with K and V that were last read a round of the pool ago."""
        batch = ragged_batch(load, self.device)
        tokens, width = load.sequences * load.new, heads.heads * heads.head_dim
        gate_up = self._ones(tokens, 2 * width)
        scale = heads.head_dim**-0.5
        calls: list[Call[Tensor]]
        if kind == "attention":
            calls = [
                partial(self.kernels.attention, k_blocks=k, v_blocks=v, batch=batch, scale=scale)
                for k, v in self._layers(heads, batch)
            ]
        else:
            calls = [
                partial(self.kernels.attention_quantized, kv=kv, batch=batch, scale=scale)
                for kv in self._quantized_layers(KV_KINDS[kind], heads, batch)
            ]
        project = self._linear(1, STREAMED_ROWS)

        def prepare() -> Tensor:
            project()
            return self.kernels.silu_mul(gate_up).view(tokens, heads.heads, heads.head_dim)

        return self.stopwatch.time_s(calls, prepare, self.grid.cell_s)

    def _pointwise_s(self, kind: str, tokens: int, width: int) -> float:
        """Seconds of one call behind the linear that makes its input."""
        kernels, weight = self.kernels, self._ones(width).float()
        given = self._linear(tokens, 2 * width if kind == "silu_mul" else width)
        calls: Sequence[Call[Tensor]]
        if kind == "rope_and_store":
            heads = Heads(width // 64 - 2 * (width // 256), width // 256, 64)
            batch = ragged_batch(Load(1, tokens, tokens) if tokens > 32 else Load(tokens, 64), self.device)
            cos = torch.ones(4096, 32, device=self.device)
            calls = [
                partial(kernels.rope_and_store, cos=cos, sin=cos * 0, batch=batch, k_blocks=k, v_blocks=v)
                for k, v in self._layers(heads, batch)
            ]
        elif kind == "embed":
            rows = min(32768, self.pool.size_bytes // 4 // width)
            table = self.pool.blocks((rows, width), torch.bfloat16, 1)[0]
            ids = torch.randint(rows, (SAMPLES, tokens), device=self.device)
            calls = [partial(_embed, table=table, ids=row, dtype=kernels.activation_dtype) for row in ids]
        elif kind == "rms_norm":
            calls = [lambda x: kernels.rms_norm(x, weight, EPS)] * SAMPLES
        elif kind == "add_rms_norm":
            residual = self._ones(tokens, width) * 0
            calls = [lambda x: kernels.add_rms_norm(x, residual, weight, EPS)] * SAMPLES
        else:
            assert kind == "silu_mul", kind
            calls = [kernels.silu_mul] * SAMPLES
        return self.stopwatch.time_s(calls, given, self.grid.cell_s)

    def _linear(self, m: int, n: int) -> Callable[[], Tensor]:
        """A linear that reads another weight each time, as large as a small model's, and returns [m, n]."""
        k = max(64, STREAMED_BYTES // (2 * n))
        x = self._ones(m, k)
        weights = itertools.cycle(self.pool.weights(self.kernels, "bf16", n, k, SAMPLES))
        return lambda: self.kernels.linear(x, next(weights))

    def _layers(self, heads: Heads, batch: RaggedBatch) -> Iterator[tuple[Tensor, Tensor]]:
        """K and V of SAMPLES layers in turn."""
        shape = (batch.block_table.numel(), BLOCK_SIZE, heads.kv_heads, heads.head_dim)
        blocks = self.kv_pool.blocks(shape, self.kernels.kv_dtype, 2 * SAMPLES)
        return zip(blocks[::2], blocks[1::2], strict=True)

    def _quantized_layers(self, format: KvQuantFormat, heads: Heads, batch: RaggedBatch) -> Iterator[QuantizedKv]:
        """Quantized K and V of SAMPLES layers in turn."""
        like = QuantizedKv.zeros(format, 1, BLOCK_SIZE, heads.kv_heads, heads.head_dim, self.device)
        blocks = batch.block_table.numel()
        k, v = (self.kv_pool.blocks((blocks, *part.shape[1:]), part.dtype, SAMPLES) for part in (like.k, like.v))
        scales = [like.scales] * SAMPLES
        if format != "fp8":
            scales = self.kv_pool.blocks((blocks, *like.scales.shape[1:]), like.scales.dtype, SAMPLES)
        return (QuantizedKv(format, *parts) for parts in zip(k, v, scales, strict=True))

    def _kv_bits(self, kind: str) -> Callable[[Heads], float]:
        """Bits that a cached number takes with its share of the scales, by the heads' width."""
        if kind == "attention":
            return lambda heads: 8.0 * self.kernels.kv_dtype.itemsize

        def bits(heads: Heads) -> float:
            like = QuantizedKv.zeros(KV_KINDS[kind], 1, BLOCK_SIZE, heads.kv_heads, heads.head_dim)
            scales = 0 if like.format == "fp8" else like.scales.nbytes
            return 8.0 * (like.k.nbytes + like.v.nbytes + scales) / (2 * BLOCK_SIZE * heads.kv_heads * heads.head_dim)

        return bits

    def _attentions(self) -> list[tuple[Heads, Load]]:
        grid, chosen = self.grid, []
        for heads, load in itertools.product(grid.heads, grid.loads):
            amounts = attention_amounts(heads, load, self.kernels.activation_dtype.itemsize)
            if amounts["kv_bytes"] <= grid.most_kv_bytes and amounts["flops"] <= grid.most_attention_flops:
                chosen.append((heads, load))
        return chosen

    def _sizes(self) -> list[tuple[int, int]]:
        sizes = itertools.product(self.grid.tokens, self.grid.widths)
        return [(tokens, width) for tokens, width in sizes if tokens * width <= self.grid.most_elements]

    def _ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=self.kernels.activation_dtype, device=self.device)


def attention_amounts(heads: Heads, load: Load, activation_bytes: float, kv_bits: float = 16.0) -> dict[str, float]:
    """What one layer's attention computes and reads, in the terms of its cost."""
    cached = load.context - load.new
    shape = StepShape.of([(cached, load.new, 1)] * load.sequences)
    return {
        "sequences": float(shape.sequences),
        "kv_bytes": 2.0 * kv_bits / 8 * heads.kv_heads * heads.head_dim * float(shape.kv_tokens),
        "flops": 4.0 * heads.heads * heads.head_dim * float(shape.attended),
        "activation_bytes": 2.0 * float(shape.tokens) * heads.heads * heads.head_dim * activation_bytes,
    }


def _embed(_: Tensor, table: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    return table[ids].to(dtype)


def ragged_batch(load: Load, device: torch.device) -> RaggedBatch:
    """A batch of equal sequences whose blocks are 0, 1, 2, ... in order."""
    blocks = -(-load.context // BLOCK_SIZE)
    table = torch.arange(load.sequences * blocks, dtype=torch.int32).view(load.sequences, blocks)
    positions = torch.arange(load.context - load.new, load.context)
    slots = table[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    return RaggedBatch(
        positions=positions.repeat(load.sequences).to(device),
        slots=slots.flatten().to(device),
        query_start=torch.arange(0, load.sequences * load.new + 1, load.new, dtype=torch.int32).to(device),
        context_len=torch.full((load.sequences,), load.context, dtype=torch.int32).to(device),
        block_table=table.to(device),
        most_queries=load.new,
    )


def fit(amounts: Sequence[dict[str, float]], seconds: Sequence[float] | NDArray[np.float64]) -> LinearCost:
    """Non-negative least squares of relative errors over a call and the measurements' amounts."""
    terms = ["call", *amounts[0]]
    relative = np.array([[1.0, *each.values()] for each in amounts]) / np.asarray(seconds)[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-300)
    solution, _ = nnls(relative / scale, np.ones(len(amounts)))
    return LinearCost(seconds=dict(zip(terms, (solution / scale).tolist(), strict=True)))
