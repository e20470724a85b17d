"""What does each pass over activations cost on a CPU: norms, activations, sums and gates?"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from membound.kernels.base import Activation
from membound.kernels.cpu.calls import LibraryCalls, Rows, SumArguments, dense, pointer

KINDS = (
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "relu_squared",
    "softplus",
    "clamped",
)  # in the order of pointwise.cpp


class PointwiseCalls(LibraryCalls):
    """Norms (norms.cpp) and what is computed element by element (pointwise.cpp)."""

    def __init__(self) -> None:
        super().__init__()
        self._rms_norm = self._declare("membound_rms_norm", _NormArguments)
        self._layer_norm = self._declare("membound_layer_norm", _NormArguments)
        self._activate = self._declare("membound_activate", _ActivationArguments)
        self._gate = self._declare("membound_gate", _GateArguments)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._normed(self._rms_norm, x, None, weight, None, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._normed(self._rms_norm, x, residual, weight, None, eps)

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        return self._normed(self._layer_norm, x, residual, weight, bias, eps)

    def norm_heads(self, x: Tensor, first: int, heads: int, weight: Tensor, eps: float) -> None:
        if x.stride(1) != 1 or x.dtype is not torch.float32:
            raise ValueError("heads are normed in place, so that rows must be dense and fp32")
        weight = dense(weight)
        width = weight.shape[-1]
        period = weight.numel() // width
        at, rows = x.data_ptr() + first * x.itemsize, self._rows(x.shape[0])
        arguments = _NormArguments(
            at, None, weight.data_ptr(), None, at, width, x.stride(0), x.stride(0), heads, period, rows, eps
        )
        self._run(self._rms_norm, arguments, weight)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self.glu(gate_up, "silu")

    def glu(self, gate_up: Tensor, activation: Activation, limit: float | None = None) -> Tensor:
        return self._activated(gate_up, activation if limit is None else "clamped", gated=True, limit=limit or 0.0)

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        return self._activated(x, activation, gated=False)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        out, first = self._empty(parts[0].shape[0], sum(part.shape[1] for part in parts)), 0
        for part in parts:
            if part.stride(1) != 1 or part.dtype is not torch.float32:
                raise ValueError("the rows of what is joined are dense and fp32")
            self._copy(part, out, first)
            first += part.shape[1]
        return out

    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        x = dense(x)
        return self._summed(x, dense(bias), 0, x)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        y = dense(y)
        return self._summed(dense(x), y, y.shape[-1])

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        return self._summed(dense(x), None, 0, factor=factor)

    def gated(self, x: Tensor, gate: Tensor, *, silu: bool = False) -> Tensor:
        x = dense(x)
        if gate.stride(-1) != 1 and gate.shape[-1] != 1:
            raise ValueError(f"the rows of a gate are dense, not {gate.stride(-1)} elements apart")
        out = self._empty(*x.shape)
        rows = x.numel() // x.shape[-1]
        widths = x.shape[-1], gate.stride(0), gate.shape[-1]
        arguments = _GateArguments(x.data_ptr(), gate.data_ptr(), out.data_ptr(), *widths, self._rows(rows), int(silu))
        self._run(self._gate, arguments)
        return out

    def _normed(
        self, operation: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        if residual is not None and (not residual.is_contiguous() or residual.dtype is not torch.float32):
            raise ValueError("the residual is changed in place, so it must be contiguous and fp32")
        if x.dim() != 2 or x.stride(1) != 1 or x.dtype is not torch.float32:
            x = dense(x)
        weight, bias = (None if each is None else dense(each) for each in (weight, bias))
        width = x.shape[-1]
        rows = x.numel() // width
        out = self._empty(*x.shape)
        addresses = x.data_ptr(), pointer(residual), pointer(weight), pointer(bias), out.data_ptr()
        stride = x.stride(0) if x.dim() == 2 else width
        arguments = _NormArguments(*addresses, width, stride, width, 1, 1, self._rows(rows), eps)
        self._run(operation, arguments, weight, bias)
        return out

    def _activated(self, x: Tensor, kind: str, *, gated: bool, limit: float = 0.0) -> Tensor:
        x = dense(x)
        width = x.shape[-1] // 2 if gated else x.shape[-1]
        rows = self._rows(x.numel() // x.shape[-1])
        out = self._empty(*x.shape[:-1], width)
        arguments = _ActivationArguments(
            x.data_ptr(), out.data_ptr(), width, rows, KINDS.index(kind), int(gated), limit
        )
        self._run(self._activate, arguments)
        return out

    def _summed(
        self, x: Tensor, y: Tensor | None, y_stride: int, out: Tensor | None = None, factor: float = 1.0
    ) -> Tensor:
        out = self._empty(*x.shape) if out is None else out
        width = x.shape[-1]
        rows = self._rows(x.numel() // width)
        arguments = SumArguments(x.data_ptr(), pointer(y), out.data_ptr(), width, width, y_stride, width, rows, factor)
        self._run(self._sum, arguments, y if y_stride == 0 else None)
        return out


class _NormArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("x", "residual", "weight", "bias", "out")]
    _fields_ += [(name, c_int64) for name in ("width", "x_stride", "out_stride", "groups", "period")]
    _fields_ += [("rows", Rows), ("eps", c_float)]


class _ActivationArguments(Structure):
    _fields_ = [("x", c_void_p), ("out", c_void_p), ("width", c_int64), ("rows", Rows)]
    _fields_ += [("kind", c_int64), ("gated", c_int64), ("limit", c_float)]


class _GateArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("x", "gate", "out")]
    _fields_ += [(name, c_int64) for name in ("width", "gate_stride", "gate_width")]
    _fields_ += [("rows", Rows), ("silu", c_int64)]
