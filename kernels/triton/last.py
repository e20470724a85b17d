"""Which of the programs that share a result ends last, and so finds all of their parts?

It combines them, which spares a launch of its own. Each leaves its part in memory, then counts itself: what all of its
threads have written must be seen by whoever sees the count, so they meet and one of them releases (as the semaphores of
NVIDIA's CUTLASS do, `include/cutlass/semaphore.h`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton.launch import is_recording

MOST_RESULTS = 2**16  # of one launch whose programs share them; more have programs for every multiprocessor


@triton.jit
def ends_last(counter, programs):
    """Whether of so many `programs` that call this with one `counter` all others have: it reads theirs with ".cg"."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1


_counters: dict[torch.device, Tensor] = {}


def counters_of(x: Tensor) -> Tensor:
    """Zeros [MOST_RESULTS] (int32), which the last programs of kernels that ran before have left so.

    Kernels that count follow one another on one stream of a device.
    """
    if is_recording():
        return torch.empty(MOST_RESULTS, dtype=torch.int32, device=x.device)
    if x.device not in _counters:
        _counters[x.device] = torch.zeros(MOST_RESULTS, dtype=torch.int32, device=x.device)
    return _counters[x.device]
