"""What does a decoder layer cost on a CPU when every operation is one pass over its bytes?

The C++ beside this file, called through ctypes. A row's result has the same bits whatever else is in the batch, so
batching and speculation return exactly the greedy tokens of the plain loop.
"""

from __future__ import annotations

from ctypes import c_int64

import torch

from membound.kernels.composed import ComposedKernels
from membound.kernels.cpu import build as cpu_build
from membound.kernels.cpu.by_head import ByHeadCalls
from membound.kernels.cpu.latent import LatentCalls
from membound.kernels.cpu.linear import BF16_FORMATS
from membound.kernels.cpu.mixture import MixtureCalls
from membound.kernels.cpu.pointwise import PointwiseCalls
from membound.kernels.cpu.recurrent import RecurrentCalls


class CpuKernels(MixtureCalls, ByHeadCalls, LatentCalls, RecurrentCalls, PointwiseCalls, ComposedKernels):
    """The C++ kernels: fp32 activations, weights in every format, K and V in bf16 or quantized.

    Where the processor has units for bf16, what weights in bf16, fp8 and 2:4 are multiplied with is rounded to it.
    Matrix units (AMX) multiply such weights always, and codes of 8 bits and fewer from four tokens on.
    """

    name = "cpp"
    activation_dtype = torch.float32
    kv_dtype = torch.bfloat16
    emulates_quantized_kv = False

    def __init__(self, *, batch_invariant: bool = False) -> None:
        """With `batch_invariant`, units for bf16 are left alone: tokens stay in fp32, on every processor.

        Raises KernelBuildError where the kernels cannot be built.
        """
        super().__init__(batch_invariant=batch_invariant)
        self._lanes = self._library.membound_lanes()
        self._stalls = self._library.membound_stalls
        self._stalls.restype = c_int64

    def stalls(self) -> int:
        """How often, in this process, a thread was missing for over 1 ms because other programs held its core.

        After each, some calls run on one thread: a measurement in which this number grows is not clean.
        """
        return int(self._stalls())

    def describe(self) -> str:
        pool = "torch's threads" if cpu_build.openmp_runtime() else "one thread, no OpenMP runtime found"
        text = f"C++ kernels, {32 * self._lanes}-bit vectors, {pool}"
        if self._rounds_to_bf16:
            text += f"; tokens in bf16 for weights in {', '.join(BF16_FORMATS)}"
        if self._library.membound_tile_units():
            text += "; products on matrix units (AMX)"
        return text
