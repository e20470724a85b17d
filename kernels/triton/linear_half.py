"""How fast is a linear layer of few tokens whose weights are halves, where a library splits it into two launches?

For a token or a few of them each weight is read once and used once. The vendor's library takes a narrow matrix of them
at well below the speed of memory (a product in parts and a sum, tiles for many tokens), a wide one close to it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.launch import Config, configure, launch, machine_for
from membound.kernels.triton.overlap import steps_ahead
from membound.kernels.triton.row_products import row_products
from membound.kernels.triton.split_k import store_tile, with_split_k

# Up to so many tokens and rows of weights this kernel is taken: with one token own kernels read narrow matrices 25 to
# 44 % faster than cuBLASLt on an H20 up to 16384 rows (github.com/Vinci-hit/RustInfer/pull/4), and for 1 to 8 tokens a
# whole model decodes 36 % faster (github.com/EricLBuehler/mistral.rs/pull/1788).
MOST_TOKENS, MOST_ROWS = 8, 16384


@triton.jit(do_not_specialize=["rows"])
def linear_half_kernel(x, data, out, parts, done, rows, columns, k_size, x_stride, size, EVEN_K: tl.constexpr,
                       AHEAD: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
                       BLOCK_K: tl.constexpr):  # fmt: skip
    """Program (tile of n, tile of m, split of k)."""
    acc, m, n = row_products(x, data, rows, columns, k_size, x_stride, "half", "", EVEN_K, AHEAD, OVERLAP,
                             BLOCK_N, BLOCK_M, BLOCK_K)  # fmt: skip
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
    ahead = steps_ahead(weight, block_k * weight.itemsize, k * weight.itemsize)

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
            AHEAD=ahead,
        )

    tiles = config.tiles["BLOCK_N"], config.tiles["BLOCK_M"]
    steps, shortest = -(-k // block_k), max(1, 512 // block_k)
    return with_split_k(x, n, x.dtype, tiles=tiles, steps=steps, shortest=shortest, splits=splits, start=start)


def linear_half_reference(x: Tensor, weight: Tensor) -> Tensor:
    """The same in fp32."""
    return x.float() @ weight.float().t()
