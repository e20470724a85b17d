"""What does a decoder layer cost on a CPU when every operation is one pass over its bytes?

The C++ beside this file, called through ctypes. A row's result has the same bits whatever else is in the batch
(see `batch_invariant_below`), so batching and speculation return exactly the greedy tokens of the plain loop.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
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
from membound.kernels.cpu_tape import BatchFields, Scratch, Tape, Watch, declared_replay
from membound.kernels.kv_formats import KV_DTYPES, QuantizedKv
from membound.kernels.quantize import TILE_ROWS, Packer

# From so many tokens torch's matrix units (AMX, AVX512-BF16) beat fp32 multiply-adds.
MATRIX_UNIT_TOKENS: dict[WeightFormat, int] = {"bf16": 32}
INTEGER_FORMATS = ("int8", "int4", "int3", "int2", "w8a8", "q4_k", "q6_k")
FORMATS = ("fp32", "bf16", "fp8", "sparse24", *INTEGER_FORMATS)  # in the order of cpu_weight.h
MOST_LAYOUTS = 1024
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
        self._linear = _declare(library, "membound_linear", _LinearArguments)
        self._rms_norm = _declare(library, "membound_rms_norm", _NormArguments)
        self._silu_mul = _declare(library, "membound_silu_mul", _GateArguments)
        self._rope_and_store = _declare(library, "membound_rope_and_store", _RopeArguments)
        self._attention = _declare(library, "membound_attention", _AttentionArguments)
        self._attention_scores = _declare(library, "membound_attention_scores", _AttentionArguments)
        self._replay = declared_replay(library)
        self._scratch = Scratch()
        self._tape: Tape | None = None
        self._weights: dict[int, _KnownWeight] = {}
        self._layouts: dict[int, _KvLayout] = {}
        self._last_batch: tuple[RaggedBatch, BatchFields] | None = None
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

    @contextmanager
    def recording(
        self, rows: int | None = None, batch: RaggedBatch | None = None, *, computed: bool = True
    ) -> Iterator[Tape]:
        """What is called meanwhile is recorded on a tape that can play it again, and `computed` or not.

        With `rows`, on other batches of up to so many tokens, too: then each operation works on the tokens of `batch`.
        """
        tape = Tape(self._replay, self._scratch, rows, batch, computed)
        self._tape = tape
        try:
            with Watch(tape):
                yield tape
        finally:
            self._tape = None
        tape.finish()

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        known = self._weights.get(id(weight))
        if known is None or known.weight() is not weight:
            known = self._remember(weight)
        m, k = x.shape
        if k != known.fields.k:
            raise ValueError(f"x has {k} columns, and the weight is {known.fields.n} x {known.fields.k}")
        if known.matrix_unit_tokens is not None:
            if self._tape is not None:
                self._tape.only_up_to(known.matrix_unit_tokens - 1)
            if m >= known.matrix_unit_tokens:
                return functional.linear(x.to(torch.bfloat16), weight.data).float()
        x = _contiguous(x)
        out = self._empty(m, known.fields.n)
        arguments = _LinearArguments(known.address, x.data_ptr(), out.data_ptr(), m, self._shared_rows(m))
        self._run(self._linear, arguments, weight, known)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._normed(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not residual.is_contiguous() or residual.dtype is not torch.float32:
            raise ValueError("the residual is changed in place, so it must be contiguous and fp32")
        return self._normed(x, residual, weight, eps)

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
        self._run(self._attention_scores, arguments)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = _contiguous(gate_up)
        tokens, twice = gate_up.shape
        out = self._empty(tokens, twice // 2)
        rows = self._shared_rows(tokens)
        self._run(self._silu_mul, _GateArguments(gate_up.data_ptr(), out.data_ptr(), twice // 2, tokens, rows))
        return out

    def _run(self, operation: Any, arguments: Structure, *kept: object) -> None:
        tape = self._tape
        if tape is not None:
            tape.add(operation, arguments, kept)
        if tape is None or tape.computed:
            operation(byref(arguments), torch.get_num_threads())

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape) if self._tape is None else self._tape.empty(shape)

    def _shared_rows(self, count: int) -> int | None:
        return None if self._tape is None else self._tape.shared_rows(count)

    def _normed(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        x, weight = _contiguous(x), _contiguous(weight)
        width = x.shape[-1]
        rows = x.numel() // width
        out = self._empty(*x.shape)
        arguments = _NormArguments(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            width,
            rows,
            self._shared_rows(rows),
            eps,
        )
        self._run(self._rms_norm, arguments, weight)
        return out

    def _rotate_and_store(self, qkv: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, layout: _KvLayout) -> Tensor:
        qkv, cos, sin = _contiguous(qkv), _contiguous(cos), _contiguous(sin)
        fields, kv = self._fields(batch), layout.kv
        tokens, width = qkv.shape
        heads = width // kv.head_dim - 2 * kv.kv_heads
        q = self._empty(tokens, heads, kv.head_dim)
        arguments = _RopeArguments(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            addressof(fields),
            q.data_ptr(),
            kv,
            heads,
        )
        self._run(self._rope_and_store, arguments, cos, sin, fields)
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
        out = self._empty(tokens, heads * head_dim)
        arguments = self._attention_arguments(q, layout, batch, out, scale, window, softcap)
        self._run(self._attention, arguments, self._fields(batch))
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
        return _AttentionArguments(
            q.data_ptr(),
            addressof(self._fields(batch)),
            out.data_ptr(),
            layout.kv,
            q.shape[1],
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

    def _fields(self, batch: RaggedBatch) -> BatchFields:
        if self._tape is not None:
            return self._tape.fields(batch)
        if self._last_batch is None or self._last_batch[0] is not batch:
            fields = BatchFields()
            fields.read(batch)
            self._last_batch = batch, fields  # keeping the batch keeps its addresses valid
        return self._last_batch[1]


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


class _LinearArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("weight", "x", "out")]
    _fields_ += [("rows", c_int64), ("shared_rows", c_void_p)]


class _NormArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("x", "residual", "weight", "out")]
    _fields_ += [("width", c_int64), ("rows", c_int64), ("shared_rows", c_void_p), ("eps", c_float)]


class _GateArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("gate_up", "out")]
    _fields_ += [("width", c_int64), ("rows", c_int64), ("shared_rows", c_void_p)]


class _RopeArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("qkv", "cos", "sin", "batch", "q")]
    _fields_ += [("kv", _KvBlocks), ("heads", c_int64)]


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
    _fields_ = [(name, c_void_p) for name in ("q", "batch", "out")]
    _fields_ += [("kv", _KvBlocks)]
    _fields_ += [(name, c_int64) for name in ("heads", "window", "queries", "out_stride")]
    _fields_ += [("scale", c_float), ("softcap", c_float)]


def has_bf16_units() -> bool:
    """Whether torch multiplies bf16 matrices in hardware; elsewhere it emulates them, slower than fp32."""
    names = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(bool(getattr(torch.cpu, name)()) for name in names if hasattr(torch.cpu, name))


def _declare(library: ctypes.CDLL, name: str, arguments: type[Structure]) -> Any:
    """An operation of the library: it takes its arguments and a number of threads, and returns nothing."""
    function = getattr(library, name)
    function.argtypes, function.restype = [POINTER(arguments), c_int], None
    return function


def _contiguous(x: Tensor) -> Tensor:
    if x.dtype is not torch.float32:
        raise TypeError(f"the CPU kernels take fp32 activations, not {x.dtype}")
    return x if x.is_contiguous() else x.contiguous()


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
