"""What does the state of a recurrent layer cost on a CPU?"""

from __future__ import annotations

from ctypes import Structure, addressof, c_int64, c_void_p

import torch
from torch import Tensor

from membound.kernels.base import DeltaNetVectors, Mamba2Vectors, RaggedBatch
from membound.kernels.cpu.calls import LibraryCalls, pointer

MOST_WIDTH = 16  # of a convolution


class RecurrentCalls(LibraryCalls):
    """recurrent.cpp"""

    def __init__(self) -> None:
        super().__init__()
        self._convolution = self._declare("membound_convolution", _ConvolutionArguments)
        self._mamba2 = self._declare("membound_mamba2", _Mamba2Arguments)
        self._mamba1 = self._declare("membound_mamba1", _Mamba1Arguments)
        self._gated_delta = self._declare("membound_gated_delta", _GatedDeltaArguments)
        self._delta = self._declare("membound_delta", _DeltaArguments)

    def causal_convolution(
        self, state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, batch: RaggedBatch
    ) -> Tensor:
        tokens, channels = x.shape
        if weight.shape[1] > MOST_WIDTH:
            raise ValueError(f"a convolution over {weight.shape[1]} tokens; these kernels have up to {MOST_WIDTH}")
        weight, bias = weight.float().contiguous(), None if bias is None else bias.float().contiguous()
        x, out, fields = _rows_of(x), self._empty(tokens, channels), self._fields(batch)
        addresses = (_state(state), x.data_ptr(), weight.data_ptr(), pointer(bias), out.data_ptr(), addressof(fields))
        arguments = _ConvolutionArguments(*addresses, channels, weight.shape[1], x.stride(0))
        self._run(self._convolution, arguments, weight, bias, fields)
        return out

    def mamba2_scan(
        self,
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        z: Tensor,
        vectors: Mamba2Vectors,
        batch: RaggedBatch,
    ) -> Tensor:
        tokens, heads, dim = x.shape
        groups, d_state = b.shape[1:]
        inputs = [_rows_of(part) for part in (x, dt, b, c, z)]
        out, fields = self._empty(tokens, heads, dim), self._fields(batch)
        arguments = _Mamba2Arguments(
            _state(state),
            *(part.data_ptr() for part in inputs),
            *(vector.data_ptr() for vector in (vectors.dt_bias, vectors.a, vectors.d)),
            out.data_ptr(),
            addressof(fields),
            heads,
            dim,
            d_state,
            groups,
            *(part.stride(0) for part in inputs),
        )
        self._run(self._mamba2, arguments, vectors, fields)
        return out

    def mamba1_scan(
        self,
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        z: Tensor,
        a: Tensor,
        d: Tensor,
        batch: RaggedBatch,
    ) -> Tensor:
        tokens, d_inner = x.shape
        inputs = [_rows_of(part) for part in (x, dt, b, c, z)]
        a, d = a.float().contiguous(), d.float().contiguous()
        out, fields = self._empty(tokens, d_inner), self._fields(batch)
        addresses = [part.data_ptr() for part in (*inputs, a, d, out)]
        sizes = d_inner, b.shape[1], *(part.stride(0) for part in inputs)
        arguments = _Mamba1Arguments(_state(state), *addresses, addressof(fields), *sizes)
        self._run(self._mamba1, arguments, a, d, fields)
        return out

    def gated_delta(
        self, state: Tensor, mixed: Tensor, ba: Tensor, vectors: DeltaNetVectors, batch: RaggedBatch, key_heads: int
    ) -> Tensor:
        mixed, ba = self._dense(mixed), self._dense(ba)
        _, heads, key, value = state.shape
        out, fields = self._empty(mixed.shape[0], heads, value), self._fields(batch)
        addresses = (part.data_ptr() for part in (mixed, ba, vectors.a, vectors.dt_bias, out))
        sizes = heads, key_heads, key, value
        arguments = _GatedDeltaArguments(_state(state), *addresses, addressof(fields), *sizes)
        self._run(self._gated_delta, arguments, vectors, fields)
        return out

    def rwkv6_scan(
        self, state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, u: Tensor, batch: RaggedBatch
    ) -> Tensor:
        return self._scan(state, (r, w, k, v), None, u.float().contiguous(), batch)

    def delta_scan(
        self, state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, batch: RaggedBatch
    ) -> Tensor:
        return self._scan(state, (r, w, k, v), (a, b), None, batch)

    def _scan(
        self,
        state: Tensor,
        inputs: tuple[Tensor, ...],
        rule: tuple[Tensor, Tensor] | None,
        u: Tensor | None,
        batch: RaggedBatch,
    ) -> Tensor:
        parts = [part.float().contiguous() for part in (*inputs, *(rule or ()))]
        tokens, heads, key = parts[0].shape
        value = parts[3].shape[-1]
        out, fields = self._empty(tokens, heads, value), self._fields(batch)
        addresses = [part.data_ptr() for part in parts] + ([] if rule else [None, None])
        where = pointer(u), out.data_ptr(), addressof(fields)
        self._run(self._delta, _DeltaArguments(_state(state), *addresses, *where, heads, key, value), u, fields)
        return out


def _rows_of(x: Tensor) -> Tensor:
    """x, of which only the first dimension may have gaps."""
    if x.dtype is not torch.float32 or not x[0].is_contiguous():
        raise ValueError(f"the inputs of a recurrence are fp32 and dense but for their rows, not {x.stride()}")
    return x


def _state(state: Tensor) -> int:
    if state.dtype is not torch.float32 or not state.is_contiguous():
        raise ValueError("a state is changed in place, so it must be contiguous and fp32")
    return state.data_ptr()


class _ConvolutionArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("state", "x", "weight", "bias", "out", "batch")]
    _fields_ += [(name, c_int64) for name in ("channels", "width", "x_stride")]


class _Mamba2Arguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("state", "x", "dt", "b", "c", "z", "dt_bias", "a", "d", "out", "batch")]
    _fields_ += [(name, c_int64) for name in ("heads", "dim", "d_state", "groups")]
    _fields_ += [(f"{name}_stride", c_int64) for name in ("x", "dt", "b", "c", "z")]


class _Mamba1Arguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("state", "x", "dt", "b", "c", "z", "a", "d", "out", "batch")]
    _fields_ += [("d_inner", c_int64), ("d_state", c_int64)]
    _fields_ += [(f"{name}_stride", c_int64) for name in ("x", "dt", "b", "c", "z")]


class _GatedDeltaArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("state", "mixed", "ba", "a", "dt_bias", "out", "batch")]
    _fields_ += [(name, c_int64) for name in ("heads", "key_heads", "key", "value")]


class _DeltaArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("state", "r", "w", "k", "v", "a", "b", "u", "out", "batch")]
    _fields_ += [(name, c_int64) for name in ("heads", "key", "value")]
