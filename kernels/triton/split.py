"""How is one sequence's attention shared by several programs, and their results combined?

Flash-decoding: each program attends to a part of the context and leaves its normalized result with log2 of its
softmax's sum; the reduction weighs each part by its share of the whole sum. Source: Dao, Haziza, Massa and Sizov,
Flash-Decoding for long-context inference, 2023.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton.launch import configure, launch, machine_for
from membound.kernels.triton.overlap import follow

NO_WINDOW = 2**30
MOST_PARTS = 128  # of a context: about one for each multiprocessor where a step has a single program


@triton.jit
def begin_of(context, queries, window):
    """The first token of a sequence that one of its `queries` last tokens sees."""
    return tl.maximum(context - queries + 1 - window, 0)


@triton.jit
def length_of(begin, end, splits, SHORTEST: tl.constexpr):
    """The tokens of each part of those from begin to end."""
    return tl.maximum(tl.cdiv(tl.cdiv(end - begin, splits), SHORTEST) * SHORTEST, SHORTEST)


@triton.jit
def part_of(begin, end, split, splits, SHORTEST: tl.constexpr):
    """The part of tokens begin to end that program `split` attends to; the last programs' parts may be empty."""
    tokens = length_of(begin, end, splits, SHORTEST)
    first = tl.minimum(begin + split * tokens, end)
    return first, tl.minimum(first + tokens, end)


@triton.jit
def parts_of(begin, end, splits, SHORTEST: tl.constexpr):
    """How many parts have tokens; of none the first counts."""
    return tl.maximum(tl.cdiv(end - begin, length_of(begin, end, splits, SHORTEST)), 1)


# In how many parts a context is cut differs from step to step, and no variant of a kernel should be compiled for it.
@triton.jit(do_not_specialize=["window", "rows", "sequences", "splits"])
def combine_kernel(partial, log_sum, out, query_start, context_len, window, rows, heads, sequences, splits,
                   SHORTEST: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
                   PADDED: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_S: tl.constexpr):  # fmt: skip
    """Program (row, head): the weighted sum of the parts that its sequence really has."""
    follow(OVERLAP)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = row
    queries = 1
    if query_start is not None:
        i = tl.arange(0, PADDED)
        starts = tl.load(query_start + i, mask=i < sequences, other=2**31 - 1)
        sequence = tl.sum((starts <= row).to(tl.int32), 0) - 1
        queries = tl.load(query_start + sequence + 1) - tl.load(query_start + sequence)
    context = tl.load(context_len + sequence)
    begin = begin_of(context, queries, window)
    d = tl.arange(0, BLOCK_D)
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        first, last = part_of(begin, context, split, splits, SHORTEST)
        used = (first < last) & (split < splits)
        at = (split.to(tl.int64) * rows + row) * heads + head
        sums = tl.load(log_sum + at, mask=used, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(sums, 0))
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(sums - safe)
        decay = tl.exp2(peak - safe)
        part = tl.load(partial + at[:, None] * D + d[None, :], mask=used[:, None] & (d[None, :] < D), other=0.0)
        acc = acc * decay + tl.sum(part * weight[:, None], 0)
        total = total * decay + tl.sum(weight, 0)
        peak = new_peak
    result = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + (row * heads + head) * D + d, result.to(out.dtype.element_ty), mask=d < D)


def partials(splits: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """Room in fp32 for the parts' results [splits, rows, heads, D] and for the log2 of their sums, of `out`'s rows."""
    shape = (splits, *out.shape)
    return (
        torch.empty(shape, dtype=torch.float32, device=out.device),
        torch.empty(shape[:-1], dtype=torch.float32, device=out.device),
    )


def combine(
    partial: Tensor,
    log_sum: Tensor,
    out: Tensor,
    context_len: Tensor,
    *,
    shortest: int,
    window: int = NO_WINDOW,
    query_start: Tensor | None = None,
) -> None:
    """Writes `out` [rows, heads, D]; rows `query_start[i] : query_start[i + 1]` are of sequence i, or row i is."""
    rows, heads, head_dim = out.shape
    launch(
        combine_kernel,
        (rows, heads),
        partial,
        log_sum,
        out,
        query_start,
        context_len,
        window,
        rows,
        heads,
        context_len.shape[0],
        partial.shape[0],
        config=configure("combine", machine_for(out), head_dim=head_dim),
        SHORTEST=shortest,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        PADDED=1 if query_start is None else triton.next_power_of_2(context_len.shape[0]),
    )
