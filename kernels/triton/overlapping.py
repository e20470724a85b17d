"""May the launches of a GPU overlap? Where its kind can, it is tried once in each process, before the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.triton.machine import Machine
from membound.kernels.triton.overlap import follow

TRIED_PROGRAMS, TRIED_BLOCK = 1024, 256  # more programs than a GPU runs at once
TRIED_TURNS = 4

_apart: ContextVar[bool] = ContextVar("apart", default=False)
_found: dict[int, bool] = {}


@contextmanager
def apart() -> Iterator[None]:
    """Inside, each launch begins when the one before has ended."""
    token = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(token)


def overlapping(machine: Machine, device: torch.device, *, recorded: bool) -> bool:
    """Whether launches overlap now; of `recorded` ones, which need no GPU, whether the machine's would."""
    return machine.overlaps and not _apart.get() and (recorded or works(device))


def works(device: torch.device) -> bool:
    """Whether a graph of overlapping launches can be made on this GPU, and each finds what the last one left."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _found:
        if torch.cuda.is_current_stream_capturing():
            return False
        _found[index] = False
        try:
            with torch.cuda.device(index):
                _found[index] = _tried(torch.device("cuda", index))
        except Exception:  # whatever it is: launches that do not overlap have no need of it
            return False
    return _found[index]


@triton.jit
def turn_kernel(source, target, OVERLAP: tl.constexpr, BLOCK: tl.constexpr):
    """What the last program has left, back to front, plus one."""
    follow(OVERLAP)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    last = tl.num_programs(0) * BLOCK - 1
    tl.store(target + i, tl.load(source + (last - i)) + 1)


def _tried(device: torch.device) -> bool:
    """By launches that follow one another, and such that follow a copy, as a layer's first does."""
    first, second, third = torch.zeros(3, TRIED_PROGRAMS * TRIED_BLOCK, dtype=torch.int32, device=device)

    def turns() -> None:
        for _ in range(TRIED_TURNS):
            for source, target in ((first, second), (second, third)):
                turn_kernel[(TRIED_PROGRAMS,)](source, target, OVERLAP=True, BLOCK=TRIED_BLOCK, launch_pdl=True)
            first.copy_(third)

    return bool((_replayed(turns, first) == 2 * 2 * TRIED_TURNS).all())


def _replayed(run: Callable[[], None], result: Tensor) -> Tensor:
    """`result` after a run and a replay of it as a graph."""
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        run()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
    finally:
        torch.cuda.set_stream(current)  # which a capture that fails would leave
    graph.replay()
    torch.cuda.synchronize()
    return result
