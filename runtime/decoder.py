"""How does a decoder-only transformer turn a ragged batch of tokens into logits?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from membound.kernels.arena import Arena
from membound.kernels.base import Kernels, PackedWeight, RaggedBatch, WeightFormat
from membound.roofline.models import ModelSpec
from membound.runtime.supported import plain_attention
from membound.runtime.weights import LayerWeights, Weights, rope_frequencies

KvCache = list[tuple[Tensor, Tensor]]  # per layer, K and V blocks [blocks, block_size, kv_heads, head_dim]


@dataclass(frozen=True)
class PackedLayer:
    """One layer whose linears lie as the kernels read them; norms fp32, the bias in the activations' precision."""

    attn_norm: Tensor
    qkv: PackedWeight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: PackedWeight
    ffn_norm: Tensor
    gate_up: PackedWeight
    down: PackedWeight

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in vars(self).values() if part is not None)


class Decoder:
    """The forward pass over `kernels`, with every linear packed as `format` and the embedding table in bf16.

    It has as many layers as `weights`, which may be fewer than `spec` names.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, kernels: Kernels, format: WeightFormat = "bf16") -> None:
        self.spec = spec
        self.attention = plain_attention(spec)
        self.kernels = kernels
        self.format = format
        self.device = weights.embed.device
        self.embed = weights.embed
        self.layers = [self._pack(layer) for layer in weights.layers]
        self.final_norm = weights.final_norm
        self.lm_head = kernels.pack(weights.lm_head, format)
        self.cos, self.sin = _rope_tables(spec, weights)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one step reads: all but the embedding table, of which it reads a row a token."""
        return sum(layer.nbytes for layer in self.layers) + self.final_norm.nbytes + self.lm_head.nbytes

    def kv_cache(self, num_blocks: int, block_size: int) -> KvCache:
        """Zeroed K and V blocks for every layer."""
        arena = Arena() if self.device.type == "cpu" else None
        shape = (num_blocks, block_size, self.attention.kv_heads, self.attention.head_dim)

        def blocks() -> Tensor:
            if arena is not None:
                return arena.empty(shape, self.kernels.kv_dtype)
            return torch.zeros(shape, dtype=self.kernels.kv_dtype, device=self.device)

        return [(blocks(), blocks()) for _ in self.layers]

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: KvCache, logits_rows: Tensor) -> Tensor:
        """Logits [rows, vocab] in fp32 at the tokens `logits_rows` [rows] of `token_ids` [tokens].

        Writes the tokens' K and V into `kv` at `batch.slots` on the way.
        """
        kernels, eps = self.kernels, self.spec.norm_eps
        scale = self.attention.head_dim**-0.5
        next_norms = [layer.attn_norm for layer in self.layers[1:]] + [self.final_norm]

        residual = self.embed[token_ids].to(kernels.activation_dtype)  # [tokens, hidden]
        x = kernels.rms_norm(residual, self.layers[0].attn_norm, eps)
        for layer, (k_blocks, v_blocks), next_norm in zip(self.layers, kv, next_norms, strict=True):
            qkv = self._qkv(x, layer)  # [tokens, (heads + 2 * kv_heads) * head_dim]
            q = kernels.rope_and_store(qkv, self.cos, self.sin, batch, k_blocks, v_blocks)  # [tokens, heads, head_dim]
            attended = kernels.attention(q, k_blocks, v_blocks, batch, scale)  # [tokens, heads * head_dim]
            x = kernels.add_rms_norm(kernels.linear(attended, layer.o), residual, layer.ffn_norm, eps)
            hidden = kernels.silu_mul(kernels.linear(x, layer.gate_up))  # [tokens, intermediate]
            x = kernels.add_rms_norm(kernels.linear(hidden, layer.down), residual, next_norm, eps)
        return kernels.linear(x[logits_rows], self.lm_head).float()

    def _qkv(self, x: Tensor, layer: PackedLayer) -> Tensor:
        """The fused projection, then what some models add to it: a bias (Qwen2), norms of q and k (Qwen3)."""
        qkv = self.kernels.linear(x, layer.qkv)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias
        if layer.q_norm is not None and layer.k_norm is not None:
            attention = self.attention
            tokens, q_size = qkv.shape[0], attention.heads * attention.head_dim
            q, k, v = qkv.split([q_size, *2 * (attention.kv_heads * attention.head_dim,)], dim=-1)
            q = self.kernels.rms_norm(q.reshape(-1, attention.head_dim), layer.q_norm, self.spec.norm_eps)
            k = self.kernels.rms_norm(k.reshape(-1, attention.head_dim), layer.k_norm, self.spec.norm_eps)
            qkv = torch.cat([q.view(tokens, -1), k.view(tokens, -1), v], dim=-1)
        return qkv

    def _pack(self, layer: LayerWeights) -> PackedLayer:
        def pack(weight: Tensor) -> PackedWeight:
            return self.kernels.pack(weight, self.format)

        bias = layer.qkv_bias
        return PackedLayer(
            attn_norm=layer.attn_norm,
            qkv=pack(layer.qkv),
            qkv_bias=None if bias is None else bias.to(self.kernels.activation_dtype),
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            o=pack(layer.o),
            ffn_norm=layer.ffn_norm,
            gate_up=pack(layer.gate_up),
            down=pack(layer.down),
        )


def _rope_tables(spec: ModelSpec, weights: Weights) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's rotation, each [max_context, head_dim / 2] in fp32."""
    frequencies = rope_frequencies(spec).to(weights.embed.device)
    if weights.rope_factors is not None:
        frequencies = frequencies / weights.rope_factors
    positions = torch.arange(spec.max_context, dtype=torch.float32, device=frequencies.device)
    angles = torch.outer(positions, frequencies)
    return angles.cos(), angles.sin()
