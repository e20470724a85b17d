"""How fast is a linear layer that keeps 2 of every 4 weights, when it really reads 9/16 of the bytes?

Of each group of four weights the two kept ones are stored, with 2 bits each that say where they were: 36 bits instead
of 64. A program puts them back in their places in registers, four times with a quarter of the columns, and multiplies
each time with the activations of those columns. (The sparse instructions of the tensor cores save arithmetic, of which
a batch of few tokens has plenty; the bytes are what counts.)
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

HALF_CHUNK = 32  # groups of which one byte each holds the places in its low bits; the next 32 are in its high bits
CHUNK = 2 * HALF_CHUNK  # groups, of 4 columns each


@dataclass(frozen=True)
class SparseWeight:
    """A weight [n, columns] of which at most 2 in each 4 adjacent columns are not zero, in bf16 or fp16.

    `values` is [n, chunks, 2 halves, 2 kept, 32 groups]; `places` [n, chunks, 32] uint8 has for a group of the first
    half (low bits) and of the second the place of its first value in bits 0 and 1 and of its second in bits 2 and 3.
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
        kept = groups.gather(-1, place).view(n, chunks, 2, HALF_CHUNK, 2)
        code = (place[..., 0] | (place[..., 1] << 2)).to(torch.uint8).view(n, chunks, 2, HALF_CHUNK)
        places = code[:, :, 0] | (code[:, :, 1] << 4)
        return cls(kept.transpose(3, 4).contiguous(), places.contiguous(), k)

    def dequantized(self) -> Tensor:
        """The weight [n, columns] in fp32, zeros included."""
        n = self.values.shape[0]
        code = torch.stack([self.places & 0xF, self.places >> 4], dim=2).long()  # [n, chunks, 2, 32]
        dense = torch.zeros(*code.shape, 4, device=code.device)
        for kept, place in enumerate((code & 3, code >> 2)):
            dense.scatter_(-1, place[..., None], self.values[:, :, :, kept, :, None].float())
        return dense.view(n, -1)[:, : self.columns]


@triton.jit
def unpruned_dot(first, second, code, x, acc, PLACE: tl.constexpr):
    """acc + the product of the weights whose column in its group is PLACE, zero if it was not kept."""
    nothing = tl.zeros(first.shape, first.dtype)
    kept = tl.where((code & 3) == PLACE, first, tl.where((code >> 2) == PLACE, second, nothing))
    return dot(kept, tl.trans(x), acc)


@triton.jit(do_not_specialize=["rows"])
def linear_sparse_kernel(x, values, places, out, parts, done, rows, columns, k_size, chunks, x_stride, size,
                         EVEN_K: tl.constexpr, HALF: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_N: tl.constexpr,
                         BLOCK_M: tl.constexpr):  # fmt: skip
    """Program (tile of n, tile of m, split of the chunks)."""
    follow(OVERLAP)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    g = tl.arange(0, HALF)
    column = tl.arange(0, 4 * HALF)
    begin, end = split_range(chunks, tl.program_id(2))
    row = tl.minimum(n, columns - 1)  # rows behind the last are read again from the last and not stored
    chunk_at = row[:, None].to(tl.int64) * chunks
    values_at = values + chunk_at * (4 * HALF) + g[None, :]
    places_at = places + chunk_at * HALF + g[None, :]
    x_at = x + m[:, None].to(tl.int64) * x_stride + column[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for chunk in range(begin, end):
        byte = tl.load(places_at + chunk * HALF)
        for half in tl.static_range(2):
            part = values_at + chunk * (4 * HALF) + half * (2 * HALF)
            first = tl.load(part)
            second = tl.load(part + HALF)
            start = (chunk * 2 + half) * (4 * HALF)
            inside = m[:, None] < rows
            if not EVEN_K:
                inside = inside & (column[None, :] < k_size - start)
            token = tl.load(x_at + start, mask=inside, other=0.0)
            even, odd = tl.split(tl.reshape(token, [BLOCK_M, HALF, 2, 2]))
            x0, x2 = tl.split(even)
            x1, x3 = tl.split(odd)
            code = (byte >> (4 * half)) & 0xF
            acc = unpruned_dot(first, second, code, x0, acc, 0)
            acc = unpruned_dot(first, second, code, x1, acc, 1)
            acc = unpruned_dot(first, second, code, x2, acc, 2)
            acc = unpruned_dot(first, second, code, x3, acc, 3)
    store_tile(out, parts, done, acc, m, n, rows, columns, size)


def linear_sparse(
    x: Tensor, weight: SparseWeight, *, splits: int | None = None, config: Config | None = None
) -> Tensor:
    """x [m, k] times the weight [n, k] transposed, summed in fp32: [m, n] in x's dtype."""
    n, k = weight.shape
    chunks = -(-k // (4 * CHUNK))
    check.strided("x", x, [None, k], check.HALVES)
    check.tensor("weight.values", weight.values, [n, chunks, 2, 2, HALF_CHUNK], [x.dtype], x)
    check.tensor("weight.places", weight.places, [n, chunks, HALF_CHUNK], [torch.uint8], x)
    m = x.shape[0]
    config = config or configure("linear_sparse", machine_for(x), m=m)

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
            HALF=HALF_CHUNK,
        )

    tiles = config.tiles["BLOCK_N"], config.tiles["BLOCK_M"]
    return with_split_k(x, n, x.dtype, tiles=tiles, steps=chunks, shortest=2, splits=splits, start=start)


def linear_sparse_reference(x: Tensor, weight: SparseWeight) -> Tensor:
    """The same in fp32."""
    return x.float() @ weight.dequantized().t()
