"""How is one matrix product shared by more programs than it has tiles of output?

Each program of a split sums a part of k and leaves it in fp32; the reduction adds the parts in order, so the result
has the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton.launch import configure, launch, machine_for, splits_for

# Parts are written and read again, so all together have at most so many rows: 512 x 4096 in fp32 are 8 MB, which stay
# in the cache of every GPU in the table.
MOST_PART_ROWS = 512


@triton.jit
def split_range(steps, split):
    """The part of `steps` that belongs to a split, of as many as the grid has: none needs a variant of its own."""
    part = tl.cdiv(steps, tl.num_programs(2))
    return tl.minimum(split * part, steps), tl.minimum(split * part + part, steps)


@triton.jit
def store_tile(out, acc, m, n, rows, columns, split_stride):
    """Writes acc [N, M], a tile of y [rows, columns] transposed, to its split's part of `out`."""
    where = out + tl.program_id(2).to(tl.int64) * split_stride + m[:, None].to(tl.int64) * columns + n[None, :]
    tl.store(where, tl.trans(acc).to(out.dtype.element_ty), mask=(m[:, None] < rows) & (n[None, :] < columns))


@triton.jit
def split_k_sum_kernel(parts, out, size, splits, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Each program adds up BLOCK elements of all parts, of which there are up to PADDED, a power of two."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    part = parts + at
    for split in tl.static_range(PADDED):
        total += tl.load(part, mask=(at < size) & (split < splits), other=0.0)
        part += size
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


def with_split_k(
    x: Tensor, n: int, dtype: torch.dtype, *, tiles: tuple[int, int], steps: int, shortest: int, splits: int | None,
    start: Callable[[tuple[int, int, int], Tensor], None],
) -> Tensor:  # fmt: skip
    """y [m, n] in `dtype`: `start(grid, out)` launches programs (tile of n, tile of m, split) that write `out`.

    `tiles` are the sizes of those of n and m; k is `steps` steps, of which a split should have `shortest`. Without
    splitting `out` is y, otherwise parts [splits, m, n] in fp32 that are added up.
    """
    m = x.shape[0]
    machine = machine_for(x)
    grid = (triton.cdiv(n, tiles[0]), triton.cdiv(m, tiles[1]))
    if splits is None:
        # Few tokens: what limits a program is what it has in flight, so several share a multiprocessor.
        waves = 3 if m <= 16 else 2 if m <= 64 else 1
        splits = splits_for(grid[0] * grid[1], steps, max(shortest, steps * m // MOST_PART_ROWS), machine, waves)
    splits = min(splits, max(steps, 1))
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    if splits == 1:
        start((*grid, 1), out)
        return out
    parts = torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    start((*grid, splits), parts)
    config = configure("split_k_sum", machine)
    blocks = triton.cdiv(out.numel(), config.tiles["BLOCK"])
    padded = triton.next_power_of_2(splits)
    launch(split_k_sum_kernel, (blocks,), parts, out, out.numel(), splits, config=config, PADDED=padded)
    return out
