"""How is a weight multiplied whose rows lie one behind the other, in halves or in bytes that become halves?"""

from __future__ import annotations

import triton
import triton.language as tl

from membound.kernels.triton.lang import dot
from membound.kernels.triton.overlap import ask_for, follow
from membound.kernels.triton.split_k import split_range
from membound.kernels.triton.widen import fp8_to, int8_to


@triton.jit
def row_products(x, data, rows, columns, k_size, x_stride, FORMAT: tl.constexpr, WIDEN: tl.constexpr,
                 EVEN_K: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """The sums [N, M] of program (tile of n, tile of m, split of k), its tokens m, and its rows n of the weight.

    FORMAT is "half", "int8" or "fp8"; AHEAD steps of k are asked for before what x is computed by has ended.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    begin, end = split_range(tl.cdiv(k_size, BLOCK_K), tl.program_id(2))
    row = tl.minimum(n, columns - 1)  # rows behind the last are read again from the last and not stored
    row_at = data + row.to(tl.int64) * k_size
    STEP_BYTES: tl.constexpr = BLOCK_K * (data.dtype.element_ty.primitive_bitwidth // 8)
    ask_for(row_at + begin * BLOCK_K, AHEAD * STEP_BYTES, AHEAD, begin, end, OVERLAP)
    follow(OVERLAP)
    data_at = row_at[:, None] + k[None, :]
    x_at = x + m[:, None].to(tl.int64) * x_stride + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(begin, end):
        start = step * BLOCK_K
        if EVEN_K:
            weight = tl.load(data_at + start)
            token = tl.load(x_at + start, mask=m[:, None] < rows, other=0.0)
        else:
            inside = k[None, :] < k_size - start
            weight = tl.load(data_at + start, mask=inside, other=0)
            token = tl.load(x_at + start, mask=(m[:, None] < rows) & inside, other=0.0)
        if FORMAT == "int8":
            wide = int8_to(weight, token.dtype, WIDEN)
        elif FORMAT == "fp8":
            wide = fp8_to(weight, token.dtype, WIDEN)
        else:
            wide = weight
        acc = dot(wide, tl.trans(token), acc)
    return acc, m, n
