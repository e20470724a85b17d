"""What does a decoder layer cost on a CPU when every operation is one pass over its bytes?

The C++ beside this file, called through ctypes. A row's result has the same bits whatever else is in the batch
(see `batch_invariant_below`), so batching and speculation return exactly the greedy tokens of the plain loop.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, addressof, byref, c_float, c_int, c_int64, c_void_p
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional

from membound.kernels import cpu_build
from membound.kernels.arena import Arena
from membound.kernels.base import PackedWeight, RaggedBatch, WeightFormat
from membound.kernels.composed import ComposedKernels
from membound.kernels.kv_formats import KV_DTYPES, QuantizedKv
from membound.kernels.quantize import TILE_ROWS, Packer

# From so many tokens torch's matrix units (AMX, AVX512-BF16) beat fp32 multiply-adds.
MATRIX_UNIT_TOKENS: dict[WeightFormat, int] = {"bf16": 32}
INTEGER_FORMATS = ("int8", "int4", "int3", "int2", "w8a8", "q4_k", "q6_k")
FORMATS = ("fp32", "bf16", "fp8", "sparse24", *INTEGER_FORMATS)  # in the order of cpu_weight.h
MOST_LAYOUTS = 1024
LARGEST_TREE = 64
NO_WINDOW = 2**62
KV_FORMATS = ("bf16", "fp8", "int8", "int4")  # in the order of cpu_kv.h


class CpuKernels(ComposedKernels):
    """The C++ kernels: fp32 activations, weights in every format, K and V in bf16 or quantized."""

    name = "cpp"
    activation_dtype = torch.float32
    kv_dtype = torch.bfloat16
    emulates_quantized_kv = False
    interleaved = True

    def __init__(self, *, batch_invariant: bool = False) -> None:
        """With `batch_invariant`, torch's matrix units are left alone, so that every m gives the same bits.

        Raises KernelBuildError where the kernels cannot be built.
        """
        library = cpu_build.load_library()
        self._linear = _declare(library, "membound_linear", "ppp" + "l" + "i")
        self._rms_norm = _declare(library, "membound_rms_norm", "ppp" + "ll" + "fi")
        self._add_rms_norm = _declare(library, "membound_add_rms_norm", "pppp" + "ll" + "fi")
        self._silu_mul = _declare(library, "membound_silu_mul", "pp" + "ll" + "i")
        self._rope_and_store = library.membound_rope_and_store
        self._rope_and_store.argtypes, self._rope_and_store.restype = [POINTER(_RopeArguments), c_int], None
        self._attention = library.membound_attention
        self._attention.argtypes, self._attention.restype = [POINTER(_AttentionArguments), c_int], None
        self._attention_scores = library.membound_attention_scores
        self._attention_scores.argtypes, self._attention_scores.restype = self._attention.argtypes, None
        self._weights: dict[int, _KnownWeight] = {}
        self._layouts: dict[int, _KvLayout] = {}
        self._last_fields: _BatchFields | None = None
        self._lanes = library.membound_lanes()
        self._stalls = library.membound_stalls
        self._stalls.restype = c_int64
        self._packer = Packer(Arena(), interleaved=self.interleaved)
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

    def pack(self, weight: Tensor, format: WeightFormat, group_size: int | None = None) -> PackedWeight:
        return self._packer.pack(weight, format, group_size)

    def pack_codes(self, codes: Tensor, scale: Tensor, zero: Tensor | None, format: WeightFormat) -> PackedWeight:
        return self._packer.pack_codes(codes, scale, zero, format)

    def pack_gguf(self, raw: Tensor, type: str, shape: tuple[int, int]) -> PackedWeight:
        return self._packer.pack_gguf(raw, type, shape)

    def emulates(self, format: WeightFormat) -> bool:
        return False

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        known = self._weights.get(id(weight))
        if known is None or known.weight() is not weight:
            known = self._remember(weight)
        m, k = x.shape
        if k != known.fields.k:
            raise ValueError(f"x has {k} columns, and the weight is {known.fields.n} x {known.fields.k}")
        if known.matrix_unit_tokens is not None and m >= known.matrix_unit_tokens:
            return functional.linear(x.to(torch.bfloat16), weight.data).float()
        x = _contiguous(x)
        out = torch.empty(m, known.fields.n)
        self._linear(known.address, x.data_ptr(), out.data_ptr(), m, torch.get_num_threads())
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
        return self._rotate_and_store(qkv, cos, sin, batch, self._layout(k_blocks, v_blocks))

    def rope_and_store_quantized(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, kv: QuantizedKv
    ) -> Tensor:
        return self._rotate_and_store(qkv, cos, sin, batch, self._layout(kv.k, kv.v, kv))

    def attention(
        self,
        q: Tensor,
        k_blocks: Tensor,
        v_blocks: Tensor,
        batch: RaggedBatch,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        return self._attend(q, self._layout(k_blocks, v_blocks), batch, scale, window, softcap)

    def attention_quantized(
        self,
        q: Tensor,
        kv: QuantizedKv,
        batch: RaggedBatch,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        return self._attend(q, self._layout(kv.k, kv.v, kv), batch, scale, window, softcap)

    def attention_scores(
        self,
        q: Tensor,
        keys: Tensor | QuantizedKv,
        batch: RaggedBatch,
        scale: float,
        *,
        queries: int,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if queries < 1:
            raise ValueError(f"queries: is {queries}, should be the number of last tokens whose attention counts")
        layout = self._layout(keys.k, keys.v, keys) if isinstance(keys, QuantizedKv) else self._layout(keys, keys)
        longest = int(batch.context_len.max())
        out = torch.empty(batch.num_sequences, layout.kv.kv_heads, longest)
        q = _contiguous(q)
        arguments = self._attention_arguments(q, layout, batch, out, scale, window, softcap)
        arguments.queries, arguments.out_stride = queries, longest
        self._attention_scores(byref(arguments), torch.get_num_threads())
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = _contiguous(gate_up)
        tokens, twice = gate_up.shape
        out = torch.empty(tokens, twice // 2)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), tokens, twice // 2, torch.get_num_threads())
        return out

    def _rotate_and_store(self, qkv: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, layout: _KvLayout) -> Tensor:
        qkv, cos, sin = _contiguous(qkv), _contiguous(cos), _contiguous(sin)
        fields, kv = self._fields(batch), layout.kv
        tokens, width = qkv.shape
        heads = width // kv.head_dim - 2 * kv.kv_heads
        q = torch.empty(tokens, heads, kv.head_dim)
        arguments = _RopeArguments(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            fields.positions,
            fields.slots,
            q.data_ptr(),
            kv,
            tokens,
            heads,
        )
        self._rope_and_store(byref(arguments), torch.get_num_threads())
        return q

    def _attend(
        self,
        q: Tensor,
        layout: _KvLayout,
        batch: RaggedBatch,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        q = _contiguous(q)
        tokens, heads, head_dim = q.shape
        out = torch.empty(tokens, heads * head_dim)
        arguments = self._attention_arguments(q, layout, batch, out, scale, window, softcap)
        self._attention(byref(arguments), torch.get_num_threads())
        return out

    def _attention_arguments(
        self,
        q: Tensor,
        layout: _KvLayout,
        batch: RaggedBatch,
        out: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> _AttentionArguments:
        if window is not None and window < 1:
            raise ValueError(f"window: is {window}, should be a positive number of tokens")
        fields = self._fields(batch)
        return _AttentionArguments(
            q.data_ptr(),
            fields.query_start,
            fields.context_len,
            fields.block_table,
            fields.tree,
            out.data_ptr(),
            layout.kv,
            fields.sequences,
            q.shape[1],
            fields.table_stride,
            window or NO_WINDOW,
            0,
            0,
            scale,
            softcap or 0.0,
        )

    def _remember(self, weight: PackedWeight) -> _KnownWeight:
        coded = weight.format in INTEGER_FORMATS
        if coded and not weight.interleaved:
            raise ValueError(f"the {weight.format} weight was packed by other kernels; pack it with these")
        parts = (weight.data, weight.scale, weight.offset, weight.kept)
        for part in parts:
            if part is not None and not part.is_contiguous():
                raise ValueError(f"a part of the {weight.format} weight has strides {part.stride()}, should be dense")
        n, k = weight.shape
        fields = _WeightFields(
            *(None if part is None else part.data_ptr() for part in parts),
            n,
            k,
            weight.group_size or 0,
            weight.data.nbytes // (-(-n // TILE_ROWS) * TILE_ROWS * 4) if coded else 0,
            FORMATS.index(weight.format),
        )
        units = self._matrix_unit_tokens.get(weight.format)
        forget = partial(self._weights.pop, id(weight))
        known = self._weights[id(weight)] = _KnownWeight(ref(weight, forget), fields, addressof(fields), units)
        return known

    def _layout(self, k_blocks: Tensor, v_blocks: Tensor, quantized: QuantizedKv | None = None) -> _KvLayout:
        known = self._layouts.get(id(k_blocks))
        if (
            known is None
            or known.k_blocks() is not k_blocks
            or known.v_blocks() is not v_blocks
            or known.quantized is not quantized
        ):
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            known = self._layouts[id(k_blocks)] = _kv_layout(k_blocks, v_blocks, quantized)
        return known

    def _fields(self, batch: RaggedBatch) -> _BatchFields:
        known = self._last_fields
        if known is None or known.batch is not batch:
            known = self._last_fields = _batch_fields(batch)
        return known


class _KvBlocks(Structure):
    """K and V as the C++ sees them (cpu_kv.h)."""

    _fields_ = [(name, c_void_p) for name in ("keys", "values", "scales")]
    _fields_ += [(name, c_int64) for name in ("kv_heads", "head_dim", "block_size")]
    _fields_ += [(name, c_int64) for name in ("key_block_stride", "value_block_stride", "format")]


class _KvLayout(NamedTuple):
    """What a pair of K and V tensors looks like: reading it off them takes longer than a small kernel."""

    k_blocks: ref[Tensor]
    v_blocks: ref[Tensor]
    quantized: QuantizedKv | None
    kv: _KvBlocks


class _BatchFields(NamedTuple):
    """The addresses in a ragged batch, read once for all layers of a step; keeping the batch keeps them valid."""

    batch: RaggedBatch
    positions: int
    slots: int
    query_start: int
    context_len: int
    block_table: int
    tree: int | None
    sequences: int
    table_stride: int


class _RopeArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("qkv", "cos", "sin", "positions", "slots", "q")]
    _fields_ += [("kv", _KvBlocks), ("tokens", c_int64), ("heads", c_int64)]


class _WeightFields(Structure):
    """A packed weight as the C++ sees it (cpu_weight.h)."""

    _fields_ = [(name, c_void_p) for name in ("data", "scale", "offset", "kept")]
    _fields_ += [(name, c_int64) for name in ("n", "k", "group", "words", "format")]


class _KnownWeight(NamedTuple):
    """A packed weight whose fields were read once: reading them takes as long as a small kernel."""

    weight: ref[PackedWeight]
    fields: _WeightFields
    address: int
    matrix_unit_tokens: int | None


class _AttentionArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("q", "query_start", "context_len", "block_table", "tree", "out")]
    _fields_ += [("kv", _KvBlocks)]
    _fields_ += [(name, c_int64) for name in ("sequences", "heads", "table_stride", "window", "queries", "out_stride")]
    _fields_ += [("scale", c_float), ("softcap", c_float)]


def has_bf16_units() -> bool:
    """Whether torch multiplies bf16 matrices in hardware; elsewhere it emulates them, slower than fp32."""
    names = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(bool(getattr(torch.cpu, name)()) for name in names if hasattr(torch.cpu, name))


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
        _tree_pointer(batch),
        batch.num_sequences,
        table.stride(0),
    )


def _pointer(x: Tensor, dtype: torch.dtype) -> int:
    if x.dtype is not dtype or not x.is_contiguous():
        raise TypeError(f"a ragged batch holds contiguous {dtype}, not {x.dtype}")
    return x.data_ptr()


def _tree_pointer(batch: RaggedBatch) -> int | None:
    if batch.tree is None:
        return None
    most = int((batch.query_start[1:] - batch.query_start[:-1]).max())
    if most > LARGEST_TREE or batch.tree.shape[0] != batch.num_tokens:
        raise ValueError(
            f"tree: has {batch.tree.shape[0]} masks for {batch.num_tokens} tokens, of which a sequence brings up to "
            f"{most}; should have a mask a token, and at most {LARGEST_TREE} tokens a sequence"
        )
    return _pointer(batch.tree, torch.int64)


def _kv_layout(k_blocks: Tensor, v_blocks: Tensor, quantized: QuantizedKv | None) -> _KvLayout:
    """Blocks may lie apart (K beside V), but each must be dense."""
    _, block_size, kv_heads, stored = k_blocks.shape
    dtype = KV_DTYPES[quantized.format] if quantized else torch.bfloat16
    for blocks in (k_blocks, v_blocks):
        dense = blocks.stride()[1:] == (kv_heads * stored, stored, 1)
        if blocks.dtype is not dtype or blocks.shape[1:] != k_blocks.shape[1:] or not dense:
            raise TypeError(
                f"K and V blocks are {dtype} [blocks, block_size, kv_heads, head_dim], dense within a block, "
                f"not {blocks.dtype} with strides {blocks.stride()}"
            )
    scales = None
    if quantized:
        if not quantized.scales.is_contiguous():
            raise TypeError("the scales of quantized K and V must be contiguous")
        scales = quantized.scales.data_ptr()
    kv = _KvBlocks(
        k_blocks.data_ptr(),
        v_blocks.data_ptr(),
        scales,
        kv_heads,
        quantized.head_dim if quantized else stored,
        block_size,
        k_blocks.stride(0),
        v_blocks.stride(0),
        KV_FORMATS.index(quantized.format if quantized else "bf16"),
    )
    return _KvLayout(ref(k_blocks), ref(v_blocks), quantized, kv)
