"""How fast is a linear layer of few tokens whose weights are halves, where a library splits it into two launches?

For a token or a few of them each weight is read once and used once. The vendor's library takes a narrow matrix of them
at well below the speed of memory (a product in parts and a sum, tiles for many tokens), a wide one close to it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.lang import dot
from membound.kernels.triton.launch import Config, configure, launch, machine_for
from membound.kernels.triton.split_k import split_range, store_tile, with_split_k

# Up to so many tokens and rows of weights this kernel is taken: with one token own kernels read narrow matrices 25 to
# 44 % faster than cuBLASLt on an H20 up to 16384 rows (github.com/Vinci-hit/RustInfer/pull/4), and for 1 to 8 tokens a
# whole model decodes 36 % faster (github.com/EricLBuehler/mistral.rs/pull/1788).
MOST_TOKENS, MOST_ROWS = 8, 16384


@triton.jit
def linear_half_kernel(x, data, out, parts, done, rows, columns, k_size, x_stride, size, EVEN_K: tl.constexpr,
                       BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Program (tile of n, tile of m, split of k)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    begin, end = split_range(tl.cdiv(k_size, BLOCK_K), tl.program_id(2))
    row = tl.minimum(n, columns - 1)  # rows behind the last are read again from the last and not stored
    data_at = data + row[:, None].to(tl.int64) * k_size + k[None, :]
    x_at = x + m[:, None].to(tl.int64) * x_stride + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(begin, end):
        start = step * BLOCK_K
        if EVEN_K:
            weight = tl.load(data_at + start)
            token = tl.load(x_at + start, mask=m[:, None] < rows, other=0.0)
        else:
            inside = k[None, :] < k_size - start
            weight = tl.load(data_at + start, mask=inside, other=0.0)
            token = tl.load(x_at + start, mask=(m[:, None] < rows) & inside, other=0.0)
        acc = dot(weight, tl.trans(token), acc)
    store_tile(out, parts, done, acc, m, n, rows, columns, size)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether this kernel reads them, and is faster than the library for such a product."""
    few = x.dim() == 2 and x.shape[0] <= MOST_TOKENS and weight.shape[0] <= MOST_ROWS
    return few and x.dtype == weight.dtype in check.HALVES and x.stride(1) == 1 and weight.is_contiguous()


def linear_half(x: Tensor, weight: Tensor, *, splits: int | None = None, config: Config | None = None) -> Tensor:
    """x [m, k] times the weight [n, k] transposed, both in the same halves, summed in fp32: [m, n] in their dtype."""
    check.tensor("weight", weight, [None, None], check.HALVES)
    n, k = weight.shape
    check.strided("x", x, [None, k], [weight.dtype], weight)
    m = x.shape[0]
    config = config or configure("linear_half", machine_for(x), m=m)
    block_k = config.tiles["BLOCK_K"]

    def start(grid: tuple[int, int, int], *outputs: Tensor | None) -> None:
        launch(
            linear_half_kernel,
            grid,
            x,
            weight,
            *outputs,
            m,
            n,
            k,
            x.stride(0),
            m * n,
            config=config,
            EVEN_K=k % block_k == 0,
        )

    tiles = config.tiles["BLOCK_N"], config.tiles["BLOCK_M"]
    steps, shortest = -(-k // block_k), max(1, 512 // block_k)
    return with_split_k(x, n, x.dtype, tiles=tiles, steps=steps, shortest=shortest, splits=splits, start=start)


def linear_half_reference(x: Tensor, weight: Tensor) -> Tensor:
    """The same in fp32."""
    return x.float() @ weight.float().t()
