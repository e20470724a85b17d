"""What does every kernel mean? The plain PyTorch of each operation, on any device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from membound.kernels.base import PackedWeight, RaggedBatch, WeightFormat
from membound.kernels.composed import ComposedKernels
from membound.kernels.kv_formats import QuantizedKv
from membound.kernels.quantize import Packer, dequantize, rounded_inputs
from membound.kernels.sight import visible_tokens


class TorchKernels(ComposedKernels):
    """Plain PyTorch: fp32 activations on a CPU, bf16 elsewhere; K and V in bf16."""

    name = "torch"
    kv_dtype = torch.bfloat16
    emulates_quantized_kv = True
    interleaved = False

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.activation_dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16

        self._packer = Packer()

    def stalls(self) -> int:
        return 0

    def describe(self) -> str:
        return f"plain PyTorch {torch.__version__} on {self.device}, linear layers in bf16 (int8 weights: bf16 x int8)"

    def pack(self, weight: Tensor, format: WeightFormat, group_size: int | None = None) -> PackedWeight:
        return self._packer.pack(weight, format, group_size)

    def pack_codes(self, codes: Tensor, scale: Tensor, zero: Tensor | None, format: WeightFormat) -> PackedWeight:
        return self._packer.pack_codes(codes, scale, zero, format)

    def pack_gguf(self, raw: Tensor, type: str, shape: tuple[int, int]) -> PackedWeight:
        return self._packer.pack_gguf(raw, type, shape)

    def emulates(self, weight: PackedWeight) -> bool:
        return weight.format not in ("fp32", "bf16", "int8", "w8a8") or weight.group_size is not None

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        if weight.format == "fp32":
            y = functional.linear(x.float(), weight.data)
        elif weight.format == "bf16":
            y = functional.linear(x.to(torch.bfloat16), weight.data)
        elif weight.format == "w8a8":
            y = _linear_w8a8(x.float(), weight)
        elif weight.format == "w4a8":
            y = functional.linear(rounded_inputs(x, weight), dequantize(weight))
        elif weight.format == "int8" and weight.scale is not None and weight.group_size is None:
            y = _linear_int8(x.to(torch.bfloat16), weight.data).float() * weight.scale
        else:
            y = functional.linear(x.float(), dequantize(weight))
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
        q, k, v = _rotated(qkv, cos, sin, batch, kv_heads, head_dim)
        block, offset = batch.slots // block_size, batch.slots % block_size
        k_blocks[block, offset] = k.to(k_blocks.dtype)
        v_blocks[block, offset] = v.to(v_blocks.dtype)
        return q.to(self.activation_dtype)

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
            place, context = torch.arange(longest, device=q.device), batch.context_len[decodes, None]
            visible = place < context  # [B, longest]
            if window is not None:
                visible &= place >= context - window
            # Padding may be memory that nobody wrote, and 0 times NaN is NaN.
            k, v = (t.masked_fill(~visible[:, None, :, None], 0) for t in (k, v))
            # The heads of a group are the query rows of one attention: K and V are not repeated.
            grouped = q[rows].view(len(decodes), kv_heads, heads // kv_heads, head_dim)
            y = _attend(grouped, k, v, visible[:, None, None, :], scale, softcap)  # [B, kv_heads, group, D]
            out[rows] = y.reshape(len(decodes), heads, head_dim)
        for i, context in enumerate(contexts):
            first, last = starts[i], starts[i + 1]
            if last - first <= 1:
                continue
            seen = visible_tokens(batch, i, window)  # [queries, context]
            unread = ~seen.any(dim=0)[:, None, None]
            table = batch.block_table[i, : -(-context // block_size)].long()
            k, v = (t[table].flatten(0, 1)[:context].masked_fill(unread, 0) for t in (k_blocks, v_blocks))
            k, v = (t.transpose(0, 1).repeat_interleave(heads // kv_heads, dim=0).unsqueeze(0) for t in (k, v))
            y = _attend(q[first:last].transpose(0, 1).unsqueeze(0), k, v, seen, scale, softcap)
            out[first:last] = y[0].transpose(0, 1)  # from [1, heads, queries, D]
        return out.view(-1, heads * head_dim)

    def rope_and_store_quantized(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, kv: QuantizedKv
    ) -> Tensor:
        q, k, v = _rotated(qkv, cos, sin, batch, kv.kv_heads, kv.head_dim)
        kv.store(k, v, batch.slots)
        return q.to(self.activation_dtype)

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
        return self.attention(q, *kv.dequantized(), batch, scale, window=window, softcap=softcap)

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
        blocks = keys.dequantized()[0] if isinstance(keys, QuantizedKv) else keys
        _, block_size, kv_heads, _ = blocks.shape
        starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
        out = torch.zeros(len(contexts), kv_heads, max(contexts), device=q.device)
        for i, context in enumerate(contexts):
            first = max(starts[i], starts[i + 1] - queries)
            seen = visible_tokens(batch, i, window)[first - starts[i] :]  # [queries, context]
            table = batch.block_table[i, : -(-context // block_size)].long()
            k = blocks[table].flatten(0, 1)[:context].float().masked_fill(~seen.any(dim=0)[:, None, None], 0)
            grouped = q[first : starts[i + 1]].float().unflatten(1, (kv_heads, -1))  # [queries, kv_heads, group, D]
            scores = _capped(torch.einsum("qhgd,thd->hgqt", grouped, k) * scale, softcap)
            out[i, :, :context] = scores.masked_fill(~seen, -torch.inf).softmax(-1).sum(dim=(1, 2))
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up


def _linear_int8(x: Tensor, data: Tensor) -> Tensor:
    """x [m, k] bf16 times int8 [n, k] transposed: [m, n]."""
    if x.device.type == "cpu" and data.shape[0] % 16 == 0 and data.shape[1] % 16 == 0:
        return torch.ops.aten._weight_int8pack_mm(x, data, torch.ones(data.shape[0], dtype=x.dtype))
    return functional.linear(x, data.to(x.dtype))


def _linear_w8a8(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [m, k], rounded to int8 with a scale a token, times int8 [n, k] transposed: [m, n] in fp32."""
    assert weight.scale is not None
    scale = x.abs().amax(dim=1, keepdim=True) / 127  # [m, 1]
    codes = (x * torch.where(scale > 0, 1 / scale, 0)).round().clamp(-127, 127).to(torch.int8)
    return torch._int_mm(codes, weight.data.t()).float() * scale * weight.scale


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half: pairs (i, i + D / 2) of x [T, heads, D] by the angle i of its token."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _rotated(
    qkv: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, rotated, in fp32, and v: [tokens, heads or kv_heads, head_dim] each."""
    tokens, width = qkv.shape
    heads = width // head_dim - 2 * kv_heads
    q, k, v = qkv.view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    c, s = cos[batch.positions].unsqueeze(1), sin[batch.positions].unsqueeze(1)  # [tokens, 1, head_dim / 2]
    return _rotate(q, c, s), _rotate(k, c, s), v


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    k, v = k.to(q.dtype), v.to(q.dtype)
    if softcap is None:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = _capped((q @ k.transpose(-1, -2)).float() * scale, softcap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).to(q.dtype) @ v
