"""How is one matrix product shared by more programs than it has tiles of output?

Each program of a split leaves its part of k in fp32, and whichever of a tile's programs ends last adds the parts up, in
order, so that the result has the same bits in every run. A launch of its own for the sum would take as long as an 8B
model's weights in 4 bits do of one layer.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.last import MOST_RESULTS, counters_of, ends_last
from membound.kernels.triton.launch import machine_for, splits_for

# Parts are written and read again, so all together have at most so many rows: 512 x 4096 in fp32 are 8 MB, which stay
# in the cache of every GPU in the table.
MOST_PART_ROWS = 512


class Start(Protocol):
    """Launches programs (tile of n, tile of m, split) that write what a kernel names `out`, `parts` and `done`."""

    def __call__(self, grid: tuple[int, int, int], *outputs: Tensor | None) -> None: ...


@triton.jit
def split_range(steps, split):
    """The part of `steps` that belongs to a split, of as many as the grid has: none needs a variant of its own."""
    part = tl.cdiv(steps, tl.num_programs(2))
    return tl.minimum(split * part, steps), tl.minimum(split * part + part, steps)


@triton.jit
def store_tile(out, parts, done, acc, m, n, rows, columns, size):
    """Writes acc [N, M], a tile of y [rows, columns] transposed, to `out`.

    Of a split product it goes to `parts` [splits, size], and the last program of the tile writes the sum. `done` counts
    those of each tile that have left theirs, and is zero again behind the last.
    """
    inside = (m[:, None] < rows) & (n[None, :] < columns)
    at = m[:, None].to(tl.int64) * columns + n[None, :]
    mine = tl.trans(acc)
    if parts is None:
        tl.store(out + at, mine.to(out.dtype.element_ty), mask=inside)
    else:
        splits = tl.num_programs(2)
        tl.store(parts + tl.program_id(2).to(tl.int64) * size + at, mine, mask=inside)
        counter = done + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if ends_last(counter, splits):
            total = tl.zeros(mine.shape, tl.float32)
            # So many loads are under way at once that their registers do not outnumber those of the products.
            FEW: tl.constexpr = mine.shape[0] * mine.shape[1] <= 4096
            for _ in tl.range(0, splits, loop_unroll_factor=4 if FEW else 1):
                total += tl.load(parts + at, mask=inside, other=0.0, cache_modifier=".cg")
                parts += size
            tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
            tl.store(counter, 0)


def with_split_k(
    x: Tensor, n: int, dtype: torch.dtype, *, tiles: tuple[int, int], steps: int, shortest: int, splits: int | None,
    start: Start, at_once: int | None = None,
) -> Tensor:  # fmt: skip
    """y [m, n] in `dtype`, which `start` computes.

    `tiles` are the sizes of those of n and m, of whose programs a multiprocessor runs `at_once`; k is `steps` steps, of
    which a split should have `shortest`.
    """
    m = x.shape[0]
    grid = (triton.cdiv(n, tiles[0]), triton.cdiv(m, tiles[1]))
    if splits is None:
        # Few tokens: what limits a program is what it has in flight, so several share a multiprocessor.
        waves = at_once or (3 if m <= 16 else 2 if m <= 64 else 1)
        splits = splits_for(grid[0] * grid[1], steps, max(shortest, steps * m // MOST_PART_ROWS), machine_for(x), waves)
    splits = min(splits, max(steps, 1))
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    if splits == 1:
        start((*grid, 1), out, None, None)
        return out
    check.require(grid[0] * grid[1] <= MOST_RESULTS, "splits", f"are {splits} of more than {MOST_RESULTS} tiles")
    parts = torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    start((*grid, splits), out, parts, counters_of(x))
    return out
