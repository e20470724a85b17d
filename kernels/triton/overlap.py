"""How does a kernel begin while the one before it still runs?

Between two launches of a graph a GPU is idle for about a microsecond, and a product of few tokens then waits as long
for its first weights: together a good part of an 8B model's step, most of one whose weights have 4 bits. With
programmatic dependent launch, which Hopper brought (CUDA programming guide), the programs of a launch take their places
as soon as those of the launch before have no more to start. They may ask for weights there, which nobody writes; all
else must wait until the launch before has ended, for what it leaves and for what it still reads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BULK_ALIGNMENT = 16  # bytes, of where a bulk copy begins and of its size: PTX, cp.async.bulk.prefetch
ROW_BYTES_AHEAD = 512  # of a row of weights, so that tens of kilobytes are under way to each multiprocessor


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Waits until the launch before has ended, then lets the next begin.

    The first thing that a kernel does, but for `ask_for`. As all wait, what ran before the launch before has ended too.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.constexpr_function
def _asking(nbytes: int) -> str:
    return f"cp.async.bulk.prefetch.L2.global [$1], {nbytes}; // $0"


@triton.jit
def ask_for(at, NBYTES: tl.constexpr, AHEAD: tl.constexpr, begin, end, OVERLAP: tl.constexpr):
    """Asks for NBYTES behind each address: AHEAD of a program's steps `begin` to `end`, if it has as many.

    They come into the L2 cache, and nothing waits for them. Both are multiples of BULK_ALIGNMENT.
    """
    if OVERLAP and AHEAD > 0:  # noqa: SIM102 -- decided by the compiler
        if begin + AHEAD <= end:
            CODE: tl.constexpr = _asking(NBYTES)
            tl.inline_asm_elementwise(CODE, "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


def steps_ahead(weight: Tensor, step_bytes: int, row_bytes: int) -> int:
    """How many steps of so many bytes of a row to ask for.

    None where no bulk copy may begin, or where a row's last step reaches beyond its end. Memory itself is aligned.
    """
    aligned = (weight.storage_offset() * weight.itemsize | step_bytes) % BULK_ALIGNMENT == 0
    return -(-ROW_BYTES_AHEAD // step_bytes) if aligned and row_bytes % step_bytes == 0 else 0
