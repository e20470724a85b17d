"""QuaRot: how is a model rotated so that it computes the same, with no channel larger than the others?

Ashkboos et al., QuaRot: outlier-free 4-bit inference in rotated LLMs, 2024, arXiv 2404.00456, section 4. The residual
stream and the values of every head are rotated by matrices that are folded into the weights; the inputs of `down` are
rotated in each step. The paper's rotation across heads before `o` is left out, as SpinQuant has it (2024,
arXiv 2405.16406): it exists only where a Hadamard matrix has as many rows as there are heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from membound.roofline.models import GatedFfn, GroupedQueryAttention, ModelSpec
from membound.runtime.loading.weights import LayerWeights, Weights
from membound.runtime.quantization.hadamard import Rotation, rotation
from membound.runtime.quantization.quantized import QuantizationError

SIGNS_SEED = 0  # of the residual stream's rotation


def rotated(spec: ModelSpec, weights: Weights) -> Weights:
    """The weights after rotation: the model computes the same where the inputs of `down` are rotated online.

    Norms become 1, and tied tables become two.
    """
    if problem := _problem(spec, weights):
        raise QuantizationError(f"method 'quarot' cannot rotate {spec.name}: {problem}; give another method")
    residual = rotation(spec.hidden, SIGNS_SEED)
    layers = []
    for layer, tensors in zip(spec.stack, weights.layers, strict=False):
        assert isinstance(layer.attention, GroupedQueryAttention), "the check above refuses others"
        layers.append(_rotated_layer(layer.attention, tensors, residual))
    head = weights.lm_head.float() * weights.final_norm
    return replace(
        weights,
        embed=residual.apply(weights.embed).to(weights.embed.dtype),
        layers=tuple(layers),
        final_norm=torch.ones_like(weights.final_norm),
        lm_head=residual.apply(head).to(weights.lm_head.dtype),
        origin=f"{weights.origin}, rotated",
    )


def rotated_moments(spec: ModelSpec, weights: Weights, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The second moments [k, k] of the rotated model's inputs, by matrix, from those of the model as it was."""
    residual = rotation(spec.hidden, SIGNS_SEED)
    found = {}
    for index, (layer, tensors) in enumerate(zip(spec.stack, weights.layers, strict=False)):
        assert isinstance(layer.attention, GroupedQueryAttention), "`rotated` refuses others"
        for part, norm in (("qkv", "mixer_norm"), ("gate_up", "ffn_norm")):
            name, gamma = f"layers.{index}.{part}", tensors[norm]
            unscaled = torch.where(gamma == 0, 0.0, 1 / gamma)  # the norm's weight goes into the matrix
            found[name] = _both_sides(moments[name] * unscaled[:, None] * unscaled, residual.apply)
        per_head = rotation(layer.attention.value_dim)
        found[f"layers.{index}.o"] = _both_sides(moments[f"layers.{index}.o"], partial(_head_by_head, per_head))
        online = rotation(tensors["down"].shape[1])
        found[f"layers.{index}.down"] = _both_sides(moments[f"layers.{index}.down"], online.apply)
    return found


def _head_by_head(turn: Rotation, x: Tensor) -> Tensor:
    """Rows of x [rows, heads * head_dim], each head turned by itself."""
    return turn.apply(x.unflatten(1, (-1, turn.size))).flatten(1)


def _both_sides(moments: Tensor, apply: Callable[[Tensor], Tensor]) -> Tensor:
    """R^T M R, where `apply` multiplies rows by R and M is symmetric."""
    return apply(apply(moments).T.contiguous())


def _problem(spec: ModelSpec, weights: Weights) -> str | None:
    """What of a model does not commute with a rotation, or has no rule here, in words; None where all does."""
    if spec.norm != "rms" or weights.arithmetic.placement != "before":
        return "its norms are not RMS norms before attention and network"
    if weights.extras.keys() & {"embedding_norm", "positions"}:
        return "its embedding is normed, or has positions added"
    for layer in spec.stack:
        attention, ffn = layer.attention, layer.ffn
        if not isinstance(attention, GroupedQueryAttention) or not isinstance(ffn, GatedFfn):
            return f"its layers have {attention.kind} and {ffn.kind}, not gqa and gated"
        if attention.output_gate or attention.v_is_k or attention.o_bias or ffn.bias:
            return "its attention has an output gate, shared keys and values, or biases after it"
    return None


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
    new["down"] = rotation(down.shape[1]).apply(down)
    for norm in ("mixer_norm", "ffn_norm"):
        new[norm] = torch.ones_like(tensors[norm])
    for part in ("qkv", "o", "gate_up", "down"):
        new[part] = new[part].to(tensors[part].dtype).contiguous()
    return new


def _rows_rotated(rows: Tensor, per_head: Rotation) -> Tensor:
    """Rows [heads * head_dim, k] with those of each head mixed by the rotation."""
    by_head = rows.unflatten(0, (-1, per_head.size))  # [heads, head_dim, k]
    return per_head.apply(by_head.transpose(1, 2)).transpose(1, 2).reshape(rows.shape)
