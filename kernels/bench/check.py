"""Is every kernel right on this device? Each case on fresh random inputs, beside its reference in fp32."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from membound.kernels.bench.attention_cases import CASES as ATTENTION
from membound.kernels.bench.latent_cases import CASES as LATENT
from membound.kernels.bench.linear_cases import CASES as LINEAR
from membound.kernels.bench.moe_cases import CASES as MOE
from membound.kernels.bench.overlap_cases import CASES as OVERLAP
from membound.kernels.bench.pointwise_cases import CASES as POINTWISE
from membound.kernels.bench.state_cases import CASES as STATE
from membound.kernels.bench.trial import Case, Inputs, poisoned
from membound.kernels.bench.workers import answers, command_of
from membound.roofline.progress import Progress

CASES: tuple[Case, ...] = (*ATTENTION, *LATENT, *LINEAR, *MOE, *POINTWISE, *STATE, *OVERLAP)


@dataclass(frozen=True)
class Checked:
    """`error` is the largest difference as a share of the largest number; above 1, `of_tolerance` is wrong."""

    kernel: str
    case: str
    error: float
    of_tolerance: float
    problem: str | None = None

    @property
    def right(self) -> bool:
        return self.problem is None and self.of_tolerance <= 1.0


def check(cases: Sequence[Case], device: torch.device, seed: int, progress: Progress) -> list[Checked]:
    """Every case once; what a kernel raises is its problem, and the others are still checked."""
    found = []
    for done, case in enumerate(cases):
        progress(done / len(cases), f"{case.kernel}: {case.name}")
        found.append(_checked(case, device, seed))
    return found


def check_apart(numbers: Sequence[int], device: torch.device, seed: int, workers: int) -> Iterator[tuple[int, Checked]]:
    """CASES of these numbers in so many processes, as they are done; one that ends its process is wrong."""
    for answer in answers(command_of("check", str(device), seed), numbers, workers):
        case = CASES[answer.case]
        failed = Checked(case.kernel, case.name, math.inf, math.inf, answer.problem)
        yield answer.case, failed if answer.row is None else Checked(**answer.row)


def _checked(case: Case, device: torch.device, seed: int) -> Checked:
    # Not Python's hash, which differs from process to process.
    inputs = Inputs(device, seed + zlib.crc32(f"{case.kernel} {case.name}".encode()))
    try:
        trial = case.make(inputs)
        with poisoned():
            result = trial.run()
        comparisons = trial.compare(result)
        error = max((c.error() for c in comparisons), default=math.inf)
        used = max((c.used() for c in comparisons), default=math.inf)
    except Exception as failure:  # whatever it is, it belongs into the table
        text = f"{type(failure).__name__}: {failure}".splitlines()[0]
        return Checked(case.kernel, case.name, math.inf, math.inf, text)
    return Checked(case.kernel, case.name, error, used)
