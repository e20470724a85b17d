"""What do other libraries take for the same work, where they are installed?

Each function returns a call; one whose library is not here raises ImportError, and whatever else it raises is the
reason that the table gives. Their answers are not checked: that is their own tests' work.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from membound.kernels.bench.trial import Run
from membound.kernels.triton.kv_blocks import KvBlocks

FLASHINFER_WORKSPACE_BYTES = 128 * 2**20  # as its documentation advises


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _dense(blocks: Tensor, table: Tensor, tokens: int) -> Tensor:
    """Paged K or V of equal sequences as [sequences, kv_heads, tokens, head_dim]."""
    return blocks[table.long()].flatten(1, 2)[:, :tokens].transpose(1, 2).contiguous()


def sdpa_decode(q: Tensor, kv: KvBlocks, table: Tensor, contexts: Sequence[int], scale: float) -> Run:
    """On dense K and V of equal sequences: what a static cache would be read like."""
    if len(set(contexts)) != 1:
        raise ValueError("its sequences would have to be padded")
    k, v = (_dense(blocks, table, contexts[0]) for blocks in (kv.k, kv.v))
    row = q[:, :, None]
    return lambda: functional.scaled_dot_product_attention(row, k, v, scale=scale, enable_gqa=True)


def sdpa_prefill(q: Tensor, kv: KvBlocks, table: Tensor, tokens: int) -> Run:
    k, v = (_dense(blocks, table, tokens) for blocks in (kv.k, kv.v))
    queries = q.view(-1, tokens, *q.shape[1:]).transpose(1, 2).contiguous()
    return lambda: functional.scaled_dot_product_attention(queries, k, v, is_causal=True, enable_gqa=True)


def flashinfer_decode(q: Tensor, kv: KvBlocks, table: Tensor, contexts: Sequence[int]) -> Run:
    """Its paged decode on the same blocks, planned once, as an engine does for all layers of a step."""
    flashinfer = _module("flashinfer")
    size, device = kv.block_size, q.device
    counts = [-(-context // size) for context in contexts]
    indices = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
    edges = torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32, device=device)
    last = torch.tensor([(context - 1) % size + 1 for context in contexts], dtype=torch.int32, device=device)
    workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    heads, head_dim = q.shape[1:]
    types = dict(q_data_type=q.dtype, kv_data_type=kv.k.dtype)
    wrapper.plan(edges, indices, last, heads, kv.kv_heads, head_dim, size, **types)
    return lambda: wrapper.run(q, (kv.k, kv.v))


def dense(x: Tensor, n: int) -> Run:
    """The same product with bf16 weights, by cuBLAS: what the unquantized layer takes."""
    weight = torch.randn(n, x.shape[1], dtype=x.dtype, device=x.device)
    return lambda: functional.linear(x, weight)


def tinygemm_int4(x: Tensor, n: int, group: int) -> Run:
    """PyTorch's own int4 product, which torchao's int4 weight-only layout calls."""
    k = x.shape[1]
    nibbles = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=x.device)
    packed = torch.ops.aten._convert_weight_to_int4pack(nibbles, 8)
    scales = torch.randn(k // group, n, 2, dtype=x.dtype, device=x.device)
    return lambda: torch.ops.aten._weight_int4pack_mm(x, packed, group, scales)


def marlin_int4(x: Tensor, n: int, group: int) -> Run:
    """Marlin, which takes fp16; its packed weights may be any bits."""
    marlin = _module("marlin")
    m, k = x.shape
    half, out = x.half(), torch.empty(m, n, dtype=torch.float16, device=x.device)
    packed = torch.randint(-(2**31), 2**31 - 1, (k // 16, n * 2), dtype=torch.int32, device=x.device)
    scales = torch.randn(k // group, n, dtype=torch.float16, device=x.device)
    workspace = torch.zeros(n // 128 * 16, dtype=torch.int32, device=x.device)
    return lambda: marlin.mul(half, packed, out, scales, workspace)


def int_mm(x: Tensor, weight: Tensor) -> Run:
    """PyTorch's int8 product (cuBLASLt) of int8 x [m, k] and weight [n, k]: int32, without scales."""
    return lambda: torch._int_mm(x, weight.t())


def scaled_mm(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor) -> Run:
    """PyTorch's fp8 product with a scale a row on both sides."""
    left, right = (t.view(torch.float8_e4m3fn) for t in (x, weight))
    a, b = x_scale[:, None], scale[None, :]
    return lambda: torch._scaled_mm(left, right.t(), scale_a=a, scale_b=b, out_dtype=torch.bfloat16)
