"""Which kernels run on this machine, and why not the faster ones?"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch

from membound.kernels.base import Kernels
from membound.kernels.cpu.build import KernelBuildError
from membound.kernels.cpu.kernels import CpuKernels
from membound.kernels.reference import TorchKernels

Preference = Literal["auto", "cpp", "triton", "torch"]

OLDEST_CUDA = 8  # compute capability (major) from which tensor cores multiply bf16: NVIDIA Ampere

_build_errors: list[KernelBuildError] = []
_triton_problems: list[str] = []


def kernels_for(device: str, prefer: Preference = "auto", *, batch_invariant: bool = False) -> Kernels:
    """The kernels for a torch device name.

    On a CPU those are the C++ kernels where they build, on a GPU the Triton kernels where they can run, and plain
    PyTorch otherwise; `why_not_cpp` and `why_not_triton` say why. With `prefer="cpp"` a failed build raises
    KernelBuildError, with "triton" what is missing a ValueError. `batch_invariant` forbids the C++ kernels to use
    units for bf16, whose rounding is another than that of processors without.
    """
    on_cpu = device.startswith("cpu")
    if prefer in ("cpp", "triton") and on_cpu != (prefer == "cpp"):
        raise ValueError(
            f"the {_TITLES[prefer]} kernels run on a {'CPU' if prefer == 'cpp' else 'GPU'}, not on {device}"
        )
    if prefer == "torch":
        return TorchKernels(device)
    if not on_cpu:
        return _gpu_kernels(device, required=prefer == "triton")
    try:
        kernels = CpuKernels(batch_invariant=batch_invariant)
    except KernelBuildError as error:
        if prefer == "cpp":
            raise
        _build_errors[:] = [error]
        return TorchKernels(device)
    _build_errors.clear()
    return kernels


def rounding(kernels: Kernels) -> str:
    """How these kernels round, for another process that is to round alike; see `alike`."""
    return "batch-invariant" if kernels.batch_invariant else "usual"


def alike(device: str, said: str) -> Kernels:
    """The kernels for a device that round as `rounding` said of another process's."""
    return kernels_for(device, batch_invariant=said == "batch-invariant")


def why_not_cpp() -> str | None:
    """Why the last `kernels_for` on a CPU fell back to plain PyTorch; None if it did not have to."""
    return str(_build_errors[0]) if _build_errors else None


def why_not_triton() -> str | None:
    """Why the last `kernels_for` on a GPU fell back to plain PyTorch; None if it did not have to."""
    return _triton_problems[0] if _triton_problems else None


_TITLES = {"cpp": "C++", "triton": "Triton"}


def _gpu_kernels(device: str, *, required: bool) -> Kernels:
    problem = missing_for_triton(device)
    if problem is None:
        _triton_problems.clear()
        # Triton takes most of a second to import, and a CPU needs none of it.
        from membound.kernels.gpu import TritonKernels

        return TritonKernels(device)
    if required:
        raise ValueError(problem)
    _triton_problems[:] = [problem]
    return TorchKernels(device)


def missing_for_triton(device: str) -> str | None:
    """What the Triton kernels lack on a GPU, in one sentence; None where they run."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU, so nothing runs on '{device}'"
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported ({error}); a CUDA build of torch brings it (`make setup TORCH=cuda`)"
    if triton.knobs.runtime.interpret:
        return "TRITON_INTERPRET is set, so Triton's kernels run on the CPU; unset it to run them on the GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and major < OLDEST_CUDA:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; the Triton kernels need "
            f"{OLDEST_CUDA}.0 or newer, whose tensor cores multiply bf16"
        )
    return driver_problem()


@cache
def driver_problem() -> str | None:
    """Why Triton could start no kernel on this machine's GPUs: it builds its launcher here, by a C compiler."""
    import triton

    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # of a compiler that is missing or fails, of headers or a library that it does not find
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        needed = "a C compiler and this Python's headers, such as Debian's gcc and python3-dev"
        return f"Triton cannot build what starts its kernels ({said}); it needs {needed}"
    return None
