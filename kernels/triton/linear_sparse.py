"""How fast is a linear layer that keeps 2 of every 4 weights, when it really reads 9/16 of the bytes?

Of each group of four weights the two kept ones are stored, with 4 bits that say which they are: 36 bits instead of 64.
A program puts them back in their places in registers, four times with a quarter of the columns, and multiplies each
time with the activations of those columns. (The sparse instructions of the tensor cores save arithmetic, of which a
batch of few tokens has plenty; the bytes are what counts.) On NVIDIA's GPUs a register holds the values of two groups,
and bits become masks of whole halves by the instruction that moves bytes, which can also repeat their signs: so placing
takes a quarter of what comparisons of each place take, which are slower than the memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.lang import dot
from membound.kernels.triton.launch import Config, configure, launch, machine_for
from membound.kernels.triton.overlap import follow
from membound.kernels.triton.split_k import split_range, store_tile, with_split_k
from membound.kernels.triton.widen import placed

QUARTER = 32  # groups that lie together; a word holds the places of one of each of a chunk's four quarters
CHUNK = 4 * QUARTER  # groups, of 4 columns each


@dataclass(frozen=True)
class SparseWeight:
    """A weight [n, columns] of which at most 2 in each 4 adjacent columns are not zero, in bf16 or fp16.

    `values` is [n, chunks, 4 quarters, 2 kept, 32 groups]; `places` [n, chunks, 32] int16 has 4 bits for a group of
    each quarter, from the low ones on: of its columns the kept ones, which are two.
    """

    values: Tensor
    places: Tensor
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.columns

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.places.nbytes

    @classmethod
    def prune(cls, weight: Tensor) -> SparseWeight:
        """Keeps the two largest of every four; exact for a weight that is 2:4 sparse already."""
        check.strided("weight", weight, [None, None], check.HALVES, free=2)
        n, k = weight.shape
        check.require(k % 4 == 0, "weight", f"{k} columns are not groups of 4")
        chunks = -(-k // (4 * CHUNK))
        groups = torch.nn.functional.pad(weight, (0, 4 * CHUNK * chunks - k)).view(n, -1, 4)
        place = groups.abs().float().sort(dim=-1, descending=True, stable=True).indices[..., :2].sort(dim=-1).values
        kept = groups.gather(-1, place).view(n, chunks, 4, QUARTER, 2)
        bits = (1 << place).sum(-1).view(n, chunks, 4, QUARTER)
        word = sum((bits[:, :, quarter] << 4 * quarter for quarter in range(4)), torch.zeros_like(bits[:, :, 0]))
        return cls(kept.transpose(3, 4).contiguous(), word.to(torch.int16).contiguous(), k)

    def dequantized(self) -> Tensor:
        """The weight [n, columns] in fp32, zeros included."""
        n = self.values.shape[0]
        shifts = torch.arange(16, device=self.places.device).view(4, 1, 4)
        kept = (self.places[:, :, None, :, None].int() >> shifts) & 1  # [n, chunks, 4, 32, 4]
        place = kept.sort(dim=-1, descending=True, stable=True).indices[..., :2]
        dense = torch.zeros(kept.shape, device=kept.device)
        dense.scatter_(-1, place, self.values.transpose(3, 4).float())
        return dense.view(n, -1)[:, : self.columns]


@triton.jit(do_not_specialize=["rows"])
def linear_sparse_kernel(x, values, places, out, parts, done, rows, columns, k_size, chunks, x_stride, size,
                         EVEN_K: tl.constexpr, PART: tl.constexpr, WIDEN: tl.constexpr, OVERLAP: tl.constexpr,
                         BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """Program (tile of n, tile of m, split of the chunks)."""
    follow(OVERLAP)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    g = tl.arange(0, PART)
    column = tl.arange(0, 4 * PART)
    begin, end = split_range(chunks, tl.program_id(2))
    row = tl.minimum(n, columns - 1)  # rows behind the last are read again from the last and not stored
    chunk_at = row[:, None].to(tl.int64) * chunks
    values_at = values + chunk_at * (8 * PART) + g[None, :]
    places_at = places + chunk_at * PART + g[None, :]
    x_at = x + m[:, None].to(tl.int64) * x_stride + column[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for chunk in range(begin, end):
        word = tl.load(places_at + chunk * PART)
        for quarter in tl.static_range(4):
            part = values_at + (chunk * 4 + quarter) * (2 * PART)
            first = tl.load(part)
            second = tl.load(part + PART)
            start = (chunk * 4 + quarter) * (4 * PART)
            inside = m[:, None] < rows
            if not EVEN_K:
                inside = inside & (column[None, :] < k_size - start)
            token = tl.load(x_at + start, mask=inside, other=0.0)
            even, odd = tl.split(tl.reshape(token, [BLOCK_M, PART, 2, 2]))
            x0, x2 = tl.split(even)
            x1, x3 = tl.split(odd)
            acc = dot(placed(word, first, second, quarter, 0, WIDEN), tl.trans(x0), acc)
            acc = dot(placed(word, first, second, quarter, 1, WIDEN), tl.trans(x1), acc)
            acc = dot(placed(word, first, second, quarter, 2, WIDEN), tl.trans(x2), acc)
            acc = dot(placed(word, first, second, quarter, 3, WIDEN), tl.trans(x3), acc)
    store_tile(out, parts, done, acc, m, n, rows, columns, size)


def linear_sparse(
    x: Tensor, weight: SparseWeight, *, splits: int | None = None, config: Config | None = None
) -> Tensor:
    """x [m, k] times the weight [n, k] transposed, summed in fp32: [m, n] in x's dtype."""
    n, k = weight.shape
    chunks = -(-k // (4 * CHUNK))
    check.strided("x", x, [None, k], check.HALVES)
    check.tensor("weight.values", weight.values, [n, chunks, 4, 2, QUARTER], [x.dtype], x)
    check.tensor("weight.places", weight.places, [n, chunks, QUARTER], [torch.int16], x)
    m = x.shape[0]
    machine = machine_for(x)
    config = config or configure("linear_sparse", machine, m=m)

    def start(grid: tuple[int, int, int], *outputs: Tensor | None) -> None:
        launch(
            linear_sparse_kernel,
            grid,
            x,
            weight.values,
            weight.places,
            *outputs,
            m,
            n,
            k,
            chunks,
            x.stride(0),
            m * n,
            config=config,
            EVEN_K=k % (4 * CHUNK) == 0,
            PART=QUARTER,
            WIDEN=machine.widening,
        )

    tiles = config.tiles["BLOCK_N"], config.tiles["BLOCK_M"]
    return with_split_k(x, n, x.dtype, tiles=tiles, steps=chunks, shortest=2, splits=splits, start=start)


def linear_sparse_reference(x: Tensor, weight: SparseWeight) -> Tensor:
    """The same in fp32."""
    return x.float() @ weight.dequantized().t()
