"""What does every kernel mean? The plain PyTorch of each operation, on any device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from membound.kernels import quantize
from membound.kernels.base import PackedWeight, RaggedBatch, WeightFormat


class TorchKernels:
    """Plain PyTorch: fp32 activations on a CPU, bf16 elsewhere; K and V in bf16."""

    name = "torch"
    kv_dtype = torch.bfloat16

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.activation_dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def stalls(self) -> int:
        return 0

    def describe(self) -> str:
        return f"plain PyTorch {torch.__version__} on {self.device}, linear layers in bf16 (int8 weights: bf16 x int8)"

    def pack(self, weight: Tensor, format: WeightFormat) -> PackedWeight:
        return quantize.pack(weight, format)

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        if weight.format == "fp32":
            y = functional.linear(x.float(), weight.data)
        elif weight.format == "bf16":
            y = functional.linear(x.to(torch.bfloat16), weight.data)
        else:
            assert weight.scale is not None
            y = _linear_int8(x.to(torch.bfloat16), weight.data).float() * weight.scale
        return y.to(self.activation_dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        y = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()
        return y.to(self.activation_dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rope_and_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, k_blocks: Tensor, v_blocks: Tensor
    ) -> Tensor:
        _, block_size, kv_heads, head_dim = k_blocks.shape
        tokens = qkv.shape[0]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        q, k, v = qkv.view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)  # [T, heads, D]
        c, s = cos[batch.positions].unsqueeze(1), sin[batch.positions].unsqueeze(1)  # [T, 1, D / 2]
        block, offset = batch.slots // block_size, batch.slots % block_size
        k_blocks[block, offset] = _rotate(k, c, s).to(k_blocks.dtype)
        v_blocks[block, offset] = v.to(v_blocks.dtype)
        return _rotate(q, c, s).to(self.activation_dtype)

    def attention(self, q: Tensor, k_blocks: Tensor, v_blocks: Tensor, batch: RaggedBatch, scale: float) -> Tensor:
        _, heads, head_dim = q.shape
        _, block_size, kv_heads, _ = k_blocks.shape
        starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
        out = torch.empty_like(q)
        decodes = [i for i in range(len(contexts)) if starts[i + 1] - starts[i] == 1]
        if decodes:
            rows = torch.tensor([starts[i] for i in decodes], device=q.device)
            longest = max(contexts[i] for i in decodes)
            table = batch.block_table[decodes, : -(-longest // block_size)].long()  # [B, blocks]
            k = k_blocks[table].flatten(1, 2)[:, :longest].transpose(1, 2)  # [B, kv_heads, longest, D]
            v = v_blocks[table].flatten(1, 2)[:, :longest].transpose(1, 2)
            visible = torch.arange(longest, device=q.device) < batch.context_len[decodes, None]  # [B, longest]
            # Padding may be memory that nobody wrote, and 0 times NaN is NaN.
            k, v = (t.masked_fill(~visible[:, None, :, None], 0) for t in (k, v))
            # The heads of a group are the query rows of one attention: K and V are not repeated.
            grouped = q[rows].view(len(decodes), kv_heads, heads // kv_heads, head_dim)
            y = _attend(grouped, k, v, visible[:, None, None, :], scale)  # [B, kv_heads, group, D]
            out[rows] = y.reshape(len(decodes), heads, head_dim)
        for i, context in enumerate(contexts):
            first, last = starts[i], starts[i + 1]
            if last - first <= 1:
                continue
            table = batch.block_table[i, : -(-context // block_size)].long()
            k = k_blocks[table].flatten(0, 1)[:context].transpose(0, 1)  # [kv_heads, context, D]
            v = v_blocks[table].flatten(0, 1)[:context].transpose(0, 1)
            k, v = (t.repeat_interleave(heads // kv_heads, dim=0).unsqueeze(0) for t in (k, v))
            position = torch.arange(context - (last - first), context, device=q.device)
            causal = torch.arange(context, device=q.device) <= position[:, None]  # [queries, context]
            y = _attend(q[first:last].transpose(0, 1).unsqueeze(0), k, v, causal, scale)  # [1, heads, queries, D]
            out[first:last] = y[0].transpose(0, 1)
        return out.view(-1, heads * head_dim)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up


def _linear_int8(x: Tensor, data: Tensor) -> Tensor:
    """x [m, k] bf16 times int8 [n, k] transposed: [m, n]."""
    if x.device.type == "cpu" and data.shape[0] % 16 == 0 and data.shape[1] % 16 == 0:
        return torch.ops.aten._weight_int8pack_mm(x, data, torch.ones(data.shape[0], dtype=x.dtype))
    return functional.linear(x, data.to(x.dtype))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half: pairs (i, i + D / 2) of x [T, heads, D] by the angle i of its token."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return functional.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask, scale=scale)
