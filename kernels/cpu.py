"""What does a decoder layer cost on a CPU when every operation is one pass over its bytes?

The C++ beside this file, called through ctypes. A row's result has the same bits whatever else is in the batch
(see `batch_invariant_below`), so batching and speculation return exactly the greedy tokens of the plain loop.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional

from membound.kernels import cpu_build, quantize
from membound.kernels.arena import Arena
from membound.kernels.base import PackedWeight, RaggedBatch, WeightFormat

# From so many tokens torch's matrix units (AMX, AVX512-BF16) beat fp32 multiply-adds. int8 weights are widened
# first, which takes a pass over 3 bytes a weight, so they need more tokens to pay.
MATRIX_UNIT_TOKENS: dict[WeightFormat, int] = {"bf16": 32, "int8": 256}
MOST_LAYOUTS = 1024


class CpuKernels:
    """The C++ kernels: fp32 activations, weights in fp32, bf16 or int8, K and V in bf16."""

    name = "cpp"
    activation_dtype = torch.float32
    kv_dtype = torch.bfloat16

    def __init__(self, *, batch_invariant: bool = False) -> None:
        """With `batch_invariant`, torch's matrix units are left alone, so that every m gives the same bits.

        Raises KernelBuildError where the kernels cannot be built.
        """
        library = cpu_build.load_library()
        self._linear = {
            format: _declare(library, f"membound_linear_{format}", "pppp" + "lll" + "i")
            for format in ("fp32", "bf16", "int8")
        }
        self._rms_norm = _declare(library, "membound_rms_norm", "ppp" + "ll" + "fi")
        self._add_rms_norm = _declare(library, "membound_add_rms_norm", "pppp" + "ll" + "fi")
        self._silu_mul = _declare(library, "membound_silu_mul", "pp" + "ll" + "i")
        self._rope_and_store = library.membound_rope_and_store
        self._rope_and_store.argtypes, self._rope_and_store.restype = [POINTER(_RopeArguments), c_int], None
        self._attention = library.membound_attention
        self._attention.argtypes, self._attention.restype = [POINTER(_AttentionArguments), c_int], None
        self._layouts: dict[int, _KVLayout] = {}
        self._last_fields: _BatchFields | None = None
        self._lanes = library.membound_lanes()
        self._stalls = library.membound_stalls
        self._stalls.restype = c_int64
        self._arena = Arena()
        self._matrix_unit_tokens = MATRIX_UNIT_TOKENS if has_bf16_units() and not batch_invariant else {}

    def batch_invariant_below(self, format: WeightFormat) -> int | None:
        """The number of tokens in a step from which `linear` rounds differently; None means never."""
        return self._matrix_unit_tokens.get(format)

    def stalls(self) -> int:
        """How often, in this process, a thread was missing for over 1 ms because other programs held its core.

        After each, some calls run on one thread: a measurement in which this number grows is not clean.
        """
        return int(self._stalls())

    def describe(self) -> str:
        pool = "torch's threads" if cpu_build.openmp_runtime() else "one thread, no OpenMP runtime found"
        text = f"C++ kernels, {32 * self._lanes}-bit vectors, {pool}"
        for format, tokens in self._matrix_unit_tokens.items():
            text += f"; {format} linear of {tokens} tokens and more by torch's bf16 matrix units"
        return text

    def pack(self, weight: Tensor, format: WeightFormat) -> PackedWeight:
        return quantize.pack(weight, format, self._arena)

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        m, k = x.shape
        data = weight.data
        n, weight_k = data.shape
        if k != weight_k or not data.is_contiguous():
            raise ValueError(f"x has {k} columns, and the weight is {n} x {weight_k} with strides {data.stride()}")
        tokens = self._matrix_unit_tokens.get(weight.format)
        if tokens is not None and m >= tokens:
            return _linear_by_matrix_units(x, weight)
        x = _contiguous(x)
        out = torch.empty(m, n)
        scale = weight.scale
        self._linear[weight.format](
            x.data_ptr(),
            data.data_ptr(),
            None if scale is None else scale.data_ptr(),
            out.data_ptr(),
            m,
            n,
            k,
            torch.get_num_threads(),
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = _contiguous(x), _contiguous(weight)
        out = torch.empty_like(x)
        width = x.shape[-1]
        self._rms_norm(
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.numel() // width,
            width,
            eps,
            torch.get_num_threads(),
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = _contiguous(x), _contiguous(weight)
        if not residual.is_contiguous() or residual.dtype is not torch.float32:
            raise ValueError("the residual is changed in place, so it must be contiguous and fp32")
        out = torch.empty_like(x)
        width = x.shape[-1]
        self._add_rms_norm(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.numel() // width,
            width,
            eps,
            torch.get_num_threads(),
        )
        return out

    def rope_and_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, k_blocks: Tensor, v_blocks: Tensor
    ) -> Tensor:
        qkv, cos, sin = _contiguous(qkv), _contiguous(cos), _contiguous(sin)
        layout = self._layout(k_blocks, v_blocks)
        fields = self._fields(batch)
        kv_heads, head_dim = layout.kv_heads, layout.head_dim
        tokens, width = qkv.shape
        heads = width // head_dim - 2 * kv_heads
        q = torch.empty(tokens, heads, head_dim)
        arguments = _RopeArguments(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            fields.positions,
            fields.slots,
            k_blocks.data_ptr(),
            v_blocks.data_ptr(),
            q.data_ptr(),
            tokens,
            heads,
            kv_heads,
            head_dim,
            layout.block_size,
            layout.k_block_stride,
            layout.v_block_stride,
        )
        self._rope_and_store(byref(arguments), torch.get_num_threads())
        return q

    def attention(self, q: Tensor, k_blocks: Tensor, v_blocks: Tensor, batch: RaggedBatch, scale: float) -> Tensor:
        q = _contiguous(q)
        tokens, heads, head_dim = q.shape
        layout = self._layout(k_blocks, v_blocks)
        fields = self._fields(batch)
        out = torch.empty(tokens, heads * head_dim)
        arguments = _AttentionArguments(
            q.data_ptr(),
            k_blocks.data_ptr(),
            v_blocks.data_ptr(),
            fields.query_start,
            fields.context_len,
            fields.block_table,
            out.data_ptr(),
            fields.sequences,
            heads,
            layout.kv_heads,
            head_dim,
            layout.block_size,
            fields.table_stride,
            layout.k_block_stride,
            layout.v_block_stride,
            scale,
        )
        self._attention(byref(arguments), torch.get_num_threads())
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = _contiguous(gate_up)
        tokens, twice = gate_up.shape
        out = torch.empty(tokens, twice // 2)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), tokens, twice // 2, torch.get_num_threads())
        return out

    def _layout(self, k_blocks: Tensor, v_blocks: Tensor) -> _KVLayout:
        known = self._layouts.get(id(k_blocks))
        if known is None or known.k_blocks() is not k_blocks or known.v_blocks() is not v_blocks:
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            known = self._layouts[id(k_blocks)] = _kv_layout(k_blocks, v_blocks)
        return known

    def _fields(self, batch: RaggedBatch) -> _BatchFields:
        known = self._last_fields
        if known is None or known.batch is not batch:
            known = self._last_fields = _batch_fields(batch)
        return known


class _KVLayout(NamedTuple):
    """What a pair of K and V tensors looks like: reading it off them takes longer than a small kernel."""

    k_blocks: ref[Tensor]
    v_blocks: ref[Tensor]
    block_size: int
    kv_heads: int
    head_dim: int
    k_block_stride: int
    v_block_stride: int


class _BatchFields(NamedTuple):
    """The addresses in a ragged batch, read once for all layers of a step; keeping the batch keeps them valid."""

    batch: RaggedBatch
    positions: int
    slots: int
    query_start: int
    context_len: int
    block_table: int
    sequences: int
    table_stride: int


class _RopeArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("qkv", "cos", "sin", "positions", "slots", "k_blocks", "v_blocks", "q")]
    _fields_ += [(name, c_int64) for name in ("tokens", "heads", "kv_heads", "head_dim", "block_size")]
    _fields_ += [(name, c_int64) for name in ("k_block_stride", "v_block_stride")]


class _AttentionArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("q", "k_blocks", "v_blocks", "query_start", "context_len")]
    _fields_ += [(name, c_void_p) for name in ("block_table", "out")]
    _fields_ += [(name, c_int64) for name in ("sequences", "heads", "kv_heads", "head_dim", "block_size")]
    _fields_ += [(name, c_int64) for name in ("table_stride", "k_block_stride", "v_block_stride")]
    _fields_ += [("scale", c_float)]


def has_bf16_units() -> bool:
    """Whether torch multiplies bf16 matrices in hardware; elsewhere it emulates them, slower than fp32."""
    names = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(bool(getattr(torch.cpu, name)()) for name in names if hasattr(torch.cpu, name))


def _linear_by_matrix_units(x: Tensor, weight: PackedWeight) -> Tensor:
    y = functional.linear(x.to(torch.bfloat16), weight.data.to(torch.bfloat16)).float()
    return y if weight.scale is None else y.mul_(weight.scale)


def _declare(library: ctypes.CDLL, name: str, signature: str) -> Any:
    """A C function that returns nothing; p is a pointer, l an int64, i an int, f a float."""
    function = getattr(library, name)
    types = {"p": c_void_p, "l": c_int64, "i": c_int, "f": c_float}
    function.argtypes, function.restype = [types[letter] for letter in signature], None
    return function


def _contiguous(x: Tensor) -> Tensor:
    if x.dtype is not torch.float32:
        raise TypeError(f"the CPU kernels take fp32 activations, not {x.dtype}")
    return x if x.is_contiguous() else x.contiguous()


def _batch_fields(batch: RaggedBatch) -> _BatchFields:
    table = batch.block_table
    if table.dtype is not torch.int32 or table.stride(1) != 1:
        raise TypeError("a block table holds int32, a sequence a row")
    return _BatchFields(
        batch,
        _pointer(batch.positions, torch.int64),
        _pointer(batch.slots, torch.int64),
        _pointer(batch.query_start, torch.int32),
        _pointer(batch.context_len, torch.int32),
        table.data_ptr(),
        batch.num_sequences,
        table.stride(0),
    )


def _pointer(x: Tensor, dtype: torch.dtype) -> int:
    if x.dtype is not dtype or not x.is_contiguous():
        raise TypeError(f"a ragged batch holds contiguous {dtype}, not {x.dtype}")
    return x.data_ptr()


def _kv_layout(k_blocks: Tensor, v_blocks: Tensor) -> _KVLayout:
    """Blocks may lie apart (K beside V), but each must be dense."""
    _, block_size, kv_heads, head_dim = k_blocks.shape
    for blocks in (k_blocks, v_blocks):
        dense = blocks.stride()[1:] == (kv_heads * head_dim, head_dim, 1)
        if blocks.dtype is not torch.bfloat16 or blocks.shape[1:] != k_blocks.shape[1:] or not dense:
            raise TypeError("K and V blocks are bf16 [blocks, block_size, kv_heads, head_dim], dense within a block")
    strides = k_blocks.stride(0), v_blocks.stride(0)
    return _KVLayout(ref(k_blocks), ref(v_blocks), block_size, kv_heads, head_dim, *strides)
