"""What does a process do that checks or times cases for another one?

`python -m membound.kernels.bench.worker check|bench DEVICE SEED` says "ready", then answers each number of a case that
it reads with the case's row and whether it goes on, a line of JSON. It ends when its input does, or with its device.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

import torch

from membound.kernels.bench.benchmark import bench, cuda_timer
from membound.kernels.bench.check import CASES, check
from membound.kernels.bench.trial import Case
from membound.kernels.bench.workers import READY
from membound.roofline.progress import silent


def row_of(work: str, device: torch.device, seed: int) -> Callable[[Case], Any]:
    """What says how right or how fast a case is."""
    if work == "check":
        return lambda case: check([case], device, seed, silent)[0]
    timer, l2_bytes = cuda_timer(device), int(torch.cuda.get_device_properties(device).L2_cache_size)
    return lambda case: next(bench([case], device, seed, timer, l2_bytes, silent))


def usable(device: torch.device) -> bool:
    """Whether the device still computes, its memory free again: after an illegal address this process never does."""
    try:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return bool(torch.zeros(1, device=device).item() == 0)
    except RuntimeError:
        return False


def serve(work: str, device: torch.device, seed: int, answers: TextIO) -> None:
    """Answers until the input ends or the device is lost."""
    asked = row_of(work, device, seed)
    if not usable(device):
        return
    print(READY, file=answers, flush=True)
    for line in sys.stdin:
        row = asdict(asked(CASES[int(line)]))
        gc.collect()
        goes_on = usable(device)
        print(json.dumps({"row": row, "goes_on": goes_on}), file=answers, flush=True)
        if not goes_on:
            return


def main() -> None:
    """What compilers print goes to standard error, where it cannot be taken for an answer."""
    work, device, seed = sys.argv[1:]
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        serve(work, torch.device(device), int(seed), answers)


if __name__ == "__main__":
    main()
