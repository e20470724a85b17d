"""What does a cache whose KV heads hold, or read, tokens of their own cost on a CPU?"""

from __future__ import annotations

from ctypes import Structure, addressof, c_int64, c_void_p

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.kernels.by_head import MOST_SELECTING, HeadBlocks, HeldTokens, PageBounds
from membound.kernels.cpu.attention import AttentionCalls, KvBlocks, kv_layout
from membound.kernels.cpu.calls import dense, pointer


class ByHeadCalls(AttentionCalls):
    """eviction.cpp, and attention where each head has its own blocks."""

    def __init__(self) -> None:
        super().__init__()
        self._choose_places = self._declare("membound_choose_places", _PlacesArguments)
        self._choose_pages = self._declare("membound_choose_pages", _PagesArguments)

    def rope_and_store_by_head(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, kv: HeadBlocks, slots: Tensor | None = None
    ) -> Tensor:
        return self._rotate_and_store(qkv, cos, sin, batch, _head_layout(kv), slots)

    def attention_by_head(
        self,
        q: Tensor,
        kv: HeadBlocks,
        batch: RaggedBatch,
        scale: float,
        *,
        softcap: float | None = None,
        tables: Tensor | None = None,
    ) -> Tensor:
        return self._attend(q, _head_layout(kv), batch, scale, None, softcap, head_tables=tables)

    def add_attention_received(
        self,
        q: Tensor,
        kv: HeadBlocks,
        batch: RaggedBatch,
        scale: float,
        scores: Tensor,
        *,
        softcap: float | None = None,
    ) -> None:
        arguments = self._attention_arguments(dense(q), _head_layout(kv), batch, scores, scale, None, softcap)
        arguments.queries, arguments.out_stride, arguments.added = 1, scores.shape[-1], 1
        self._run(self._attention_scores, arguments, self._fields(batch), scores)

    def choose_places(self, batch: RaggedBatch, held: HeldTokens, block_size: int) -> Tensor:
        heads = held.order.shape[1]
        slots = self._empty(batch.num_tokens, 2 * heads).view(torch.int64)
        arguments = _PlacesArguments(
            addressof(self._fields(batch)),
            held.positions.data_ptr(),
            pointer(held.scores),
            held.order.data_ptr(),
            slots.data_ptr(),
            heads,
            held.positions.shape[2],
            held.budget,
            block_size,
            held.recent,
        )
        self._run(self._choose_places, arguments, self._fields(batch), held)
        return slots

    def choose_pages(self, q: Tensor, kv: HeadBlocks, bounds: PageBounds, batch: RaggedBatch, width: int) -> Tensor:
        q = dense(q)
        # A token has a row, as memory of a tape is shared out, of which a sequence needs the first.
        rows = self._empty(batch.num_tokens, kv.heads * width).view(torch.int32)
        tables = rows.view(-1, kv.heads, width)[: batch.num_sequences]
        arguments = _PagesArguments(
            q.data_ptr(),
            addressof(self._fields(batch)),
            bounds.numbers.data_ptr(),
            tables.data_ptr(),
            _head_layout(kv),
            q.shape[1],
            bounds.pages,
            width,
            MOST_SELECTING,
        )
        self._run(self._choose_pages, arguments, self._fields(batch), bounds)
        return tables


class _PlacesArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("batch", "positions", "scores", "order", "slots")]
    _fields_ += [(name, c_int64) for name in ("kv_heads", "places", "budget", "block_size", "recent")]


class _PagesArguments(Structure):
    _fields_ = [(name, c_void_p) for name in ("q", "batch", "bounds", "tables")]
    _fields_ += [("kv", KvBlocks)]
    _fields_ += [(name, c_int64) for name in ("heads", "pages", "width", "most_selecting")]


def _head_layout(blocks: HeadBlocks) -> KvBlocks:
    """What a batch calls a block, as the C++ sees it: its heads lie in blocks of their own, `apart` of each other."""
    kv = kv_layout(blocks.k, blocks.v, blocks.quantized)
    one, size = kv.key_block_stride, blocks.block_size  # of a single head's block
    kv.kv_heads = blocks.heads
    kv.key_block_stride, kv.value_block_stride = one * blocks.each, kv.value_block_stride * blocks.each
    kv.head_stride = one * blocks.apart
    kv.scale_block_stride, kv.scale_head_stride = size * blocks.each, size * blocks.apart
    return kv
