"""Which kernels run on this machine, and why not the faster ones?"""

from __future__ import annotations

from typing import Literal

from membound.kernels.base import Kernels
from membound.kernels.cpu import CpuKernels
from membound.kernels.cpu_build import KernelBuildError
from membound.kernels.reference import TorchKernels

Preference = Literal["auto", "cpp", "torch"]

_build_errors: list[KernelBuildError] = []


def kernels_for(device: str, prefer: Preference = "auto", *, batch_invariant: bool = False) -> Kernels:
    """The kernels for a torch device name.

    On a CPU those are the C++ kernels where they build, plain PyTorch otherwise, and `why_not_cpp` says why;
    with `prefer="cpp"` a failed build raises KernelBuildError. `batch_invariant` forbids the C++ kernels to
    hand large matrices to torch's bf16 units, whose rounding differs from that of small ones.
    """
    if not device.startswith("cpu"):
        if prefer == "cpp":
            raise ValueError(f"the C++ kernels run on a CPU, not on {device}")
        return TorchKernels(device)
    if prefer == "torch":
        return TorchKernels(device)
    try:
        kernels = CpuKernels(batch_invariant=batch_invariant)
    except KernelBuildError as error:
        if prefer == "cpp":
            raise
        _build_errors[:] = [error]
        return TorchKernels(device)
    _build_errors.clear()
    return kernels


def why_not_cpp() -> str | None:
    """Why the last `kernels_for` on a CPU fell back to plain PyTorch; None if it did not have to."""
    return str(_build_errors[0]) if _build_errors else None
