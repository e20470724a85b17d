"""What does attention over paged K and V cost on a CPU?"""

from __future__ import annotations

from ctypes import Structure, addressof, c_float, c_int64, c_void_p
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.kernels.cpu.calls import LibraryCalls, dense, pointer
from membound.kernels.kv_formats import KV_DTYPES, QuantizedKv

MOST_LAYOUTS = 1024
NO_WINDOW = 2**62
KV_FORMATS = ("bf16", "fp8", "int8", "int4")  # in the order of kv.h


class AttentionCalls(LibraryCalls):
    """attention.cpp, and what stores K and V (pointwise.cpp)."""

    def __init__(self) -> None:
        super().__init__()
        self._rope_and_store = self._declare("membound_rope_and_store", _RopeArguments)
        self._attention = self._declare("membound_attention", _AttentionArguments)
        self._attention_scores = self._declare("membound_attention_scores", _AttentionArguments)
        self._layouts: dict[int, _KvLayout] = {}

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

    def attention_with_sinks(
        self,
        q: Tensor,
        k_blocks: Tensor,
        v_blocks: Tensor,
        batch: RaggedBatch,
        scale: float,
        sinks: Tensor,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        return self._attend(q, self._layout(k_blocks, v_blocks), batch, scale, window, softcap, dense(sinks))

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
        kv = self._layout(keys.k, keys.v, keys) if isinstance(keys, QuantizedKv) else self._layout(keys, keys)
        longest = int(batch.context_len.max())
        out = torch.empty(batch.num_sequences, kv.kv_heads, longest)
        q = dense(q)
        arguments = self._attention_arguments(q, kv, batch, out, scale, window, softcap)
        arguments.queries, arguments.out_stride = queries, longest
        self._run(self._attention_scores, arguments)
        return out

    def _rotate_and_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: RaggedBatch,
        kv: KvBlocks,
        head_slots: Tensor | None = None,
    ) -> Tensor:
        qkv, cos, sin = self._dense(qkv), dense(cos), dense(sin)
        fields = self._fields(batch)
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
            pointer(head_slots),
        )
        self._run(self._rope_and_store, arguments, cos, sin, fields)
        return q

    def _attend(
        self,
        q: Tensor,
        kv: KvBlocks,
        batch: RaggedBatch,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
        head_tables: Tensor | None = None,
    ) -> Tensor:
        q = dense(q)
        tokens, heads, head_dim = q.shape
        out = self._empty(tokens, heads * head_dim)
        arguments = self._attention_arguments(q, kv, batch, out, scale, window, softcap)
        arguments.sinks = pointer(sinks)
        if head_tables is not None:
            arguments.head_tables, arguments.head_table_stride = head_tables.data_ptr(), head_tables.shape[-1]
        self._run(self._attention, arguments, self._fields(batch), sinks)
        return out

    def _attention_arguments(
        self,
        q: Tensor,
        kv: KvBlocks,
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
            None,
            kv,
            q.shape[1],
            window or NO_WINDOW,
            0,
            0,
            scale,
            softcap or 0.0,
        )

    def _layout(self, k_blocks: Tensor, v_blocks: Tensor, quantized: QuantizedKv | None = None) -> KvBlocks:
        known = self._layouts.get(id(k_blocks))
        if (
            known is None
            or known.k_blocks() is not k_blocks
            or known.v_blocks() is not v_blocks
            or known.quantized is not quantized
        ):
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            known = self._layouts[id(k_blocks)] = _KvLayout(
                ref(k_blocks), ref(v_blocks), quantized, kv_layout(k_blocks, v_blocks, quantized)
            )
        return known.kv


class KvBlocks(Structure):
    """K and V as the C++ sees them (kv.h)."""

    _fields_ = [(name, c_void_p) for name in ("keys", "values", "scales")]
    _fields_ += [(name, c_int64) for name in ("kv_heads", "head_dim", "block_size")]
    _fields_ += [(name, c_int64) for name in ("key_block_stride", "value_block_stride", "format")]
    _fields_ += [(name, c_int64) for name in ("token_stride", "head_stride")]
    _fields_ += [(name, c_int64) for name in ("scale_block_stride", "scale_head_stride", "scaled_heads")]


class _KvLayout(NamedTuple):
    """What a pair of K and V tensors looks like: reading it off them takes longer than a small kernel."""

    k_blocks: ref[Tensor]
    v_blocks: ref[Tensor]
    quantized: QuantizedKv | None
    kv: KvBlocks


class _RopeArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("qkv", "cos", "sin", "batch", "q")]
    _fields_ += [("kv", KvBlocks), ("heads", c_int64), ("head_slots", c_void_p)]


class _AttentionArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("q", "batch", "out", "sinks")]
    _fields_ += [("kv", KvBlocks)]
    _fields_ += [(name, c_int64) for name in ("heads", "window", "queries", "out_stride")]
    _fields_ += [("scale", c_float), ("softcap", c_float)]
    _fields_ += [("head_tables", c_void_p), ("head_table_stride", c_int64), ("added", c_int64)]


def kv_layout(k_blocks: Tensor, v_blocks: Tensor, quantized: QuantizedKv | None) -> KvBlocks:
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
    return KvBlocks(
        k_blocks.data_ptr(),
        v_blocks.data_ptr(),
        scales,
        kv_heads,
        quantized.head_dim if quantized else stored,
        block_size,
        k_blocks.stride(0),
        v_blocks.stride(0),
        KV_FORMATS.index(quantized.format if quantized else "bf16"),
        kv_heads * stored,
        stored,
        kv_heads * block_size,
        block_size,
        kv_heads,
    )
