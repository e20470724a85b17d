"""QuaRot: how is a model rotated so that it computes the same, with no channel larger than the others?

Ashkboos et al., QuaRot: outlier-free 4-bit inference in rotated LLMs, 2024, arXiv 2404.00456, section 4. The residual
stream and the values of every head are rotated by matrices that are folded into the weights; the inputs of `down` are
rotated in each step. The paper's rotation across heads before `o` is left out, as SpinQuant has it (2024,
arXiv 2405.16406): it exists only where a Hadamard matrix has as many rows as there are heads.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from membound.roofline.models import GatedFfn, GroupedQueryAttention, ModelSpec
from membound.runtime.quantization.hadamard import Rotation, rotation
from membound.runtime.quantization.quantized import QuantizationError
from membound.runtime.weights import LayerWeights, Weights


def online_rotation(intermediate: int) -> Rotation:
    """The rotation of the inputs of `down`, by the matrix's number of columns."""
    return rotation(intermediate)


def rotated(spec: ModelSpec, weights: Weights, seed: int = 0) -> Weights:
    """The weights after rotation: the model computes the same where the inputs of `down` are rotated online.

    Norms become 1, and tied tables become two.
    """
    residual = rotation(spec.hidden, seed)
    layers = []
    for layer, tensors in zip(spec.stack, weights.layers, strict=False):
        attention = layer.attention
        if not isinstance(attention, GroupedQueryAttention) or not isinstance(layer.ffn, GatedFfn):
            raise QuantizationError(
                f"method 'quarot' rotates attention of kind gqa and a gated FFN, and {spec.name} has "
                f"{attention.kind} and {layer.ffn.kind}; give another method"
            )
        layers.append(_rotated_layer(attention, tensors, residual))
    head = weights.lm_head.float() * weights.final_norm
    return replace(
        weights,
        embed=residual.apply(weights.embed).to(weights.embed.dtype),
        layers=tuple(layers),
        final_norm=torch.ones_like(weights.final_norm),
        lm_head=residual.apply(head).to(weights.lm_head.dtype),
        origin=f"{weights.origin}, rotated",
    )


def _rotated_layer(attention: GroupedQueryAttention, tensors: LayerWeights, residual: Rotation) -> LayerWeights:
    head_dim, v_rows = attention.value_dim, attention.kv_heads * attention.value_dim
    per_head = rotation(head_dim)
    new = dict(tensors)
    qkv = residual.apply(tensors["qkv"].float() * tensors["mixer_norm"])
    qkv[-v_rows:] = _rows_rotated(qkv[-v_rows:], per_head)
    new["qkv"] = qkv
    if "qkv_bias" in tensors:
        bias = tensors["qkv_bias"].clone()
        bias[-v_rows:] = _rows_rotated(bias[-v_rows:, None], per_head)[:, 0]
        new["qkv_bias"] = bias
    o = tensors["o"].float().unflatten(1, (-1, head_dim))
    new["o"] = residual.apply(per_head.apply(o).flatten(1).T).T
    new["gate_up"] = residual.apply(tensors["gate_up"].float() * tensors["ffn_norm"])
    down = residual.apply(tensors["down"].float().T).T
    new["down"] = online_rotation(down.shape[1]).apply(down)
    for norm in ("mixer_norm", "ffn_norm"):
        new[norm] = torch.ones_like(tensors[norm])
    for part in ("qkv", "o", "gate_up", "down"):
        new[part] = new[part].to(tensors[part].dtype).contiguous()
    return new


def _rows_rotated(rows: Tensor, per_head: Rotation) -> Tensor:
    """Rows [heads * head_dim, k] with those of each head mixed by the rotation."""
    by_head = rows.unflatten(0, (-1, per_head.size))  # [heads, head_dim, k]
    return per_head.apply(by_head.transpose(1, 2)).transpose(1, 2).reshape(rows.shape)
