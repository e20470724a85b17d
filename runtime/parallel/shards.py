"""Which part of a model's weights does each of several devices hold?

The division of Shoeybi et al., Megatron-LM (2019): q, k, v, gate and up by rows, o and down by columns, so that a layer
sums twice over the devices; the lm_head by rows, so that its logits are gathered.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from membound.roofline.errors import MemboundError
from membound.roofline.models import GatedFfn, GroupedQueryAttention, ModelSpec
from membound.runtime.weights import LayerWeights, Weights


def shard_spec(spec: ModelSpec, tp: int) -> ModelSpec:
    """The shape of the part that one of `tp` devices holds; raises MemboundError where the model does not divide."""
    attention, ffn = spec.usual_attention, spec.usual_ffn
    plain = len(spec.groups()) == 1
    if not (plain and isinstance(attention, GroupedQueryAttention) and isinstance(ffn, GatedFfn)):
        raise MemboundError(
            f"parallel.tp is {tp}, but the runtime divides models of equal layers with grouped-query attention and "
            f"gated networks, and {spec.name} is another; set it to 1"
        )
    for what, count in (
        ("attention.heads", attention.heads),
        ("attention.kv_heads", attention.kv_heads),
        ("ffn.intermediate", ffn.intermediate),
    ):
        if count % tp:
            raise MemboundError(f"parallel.tp is {tp}, but {what} of {spec.name} is {count}, which it does not divide")
    heads, kv_heads = attention.heads // tp, attention.kv_heads // tp
    return spec.model_copy(
        update={
            "attention": attention.model_copy(update={"heads": heads, "kv_heads": kv_heads}),
            "ffn": ffn.model_copy(update={"intermediate": ffn.intermediate // tp}),
        }
    )


def shard_weights(spec: ModelSpec, weights: Weights, rank: int, tp: int) -> Weights:
    """The part of device `rank`; the embedding is whole on each. Raises MemboundError as `shard_spec` does."""
    shard_spec(spec, tp)
    attention = spec.attention
    assert isinstance(attention, GroupedQueryAttention), "shard_spec has checked it"
    head_dim = attention.head_dim
    qkv_rows = [attention.heads * head_dim, *2 * (attention.kv_heads * head_dim,)]
    lm_head = _rows(weights.lm_head, [spec.vocab], rank, tp) if spec.vocab % tp == 0 else weights.lm_head

    def divided(layer: LayerWeights) -> LayerWeights:
        parts = dict(layer)
        parts["qkv"] = _rows(layer["qkv"], qkv_rows, rank, tp)
        if "qkv_bias" in layer:
            parts["qkv_bias"] = _rows(layer["qkv_bias"], qkv_rows, rank, tp)
        parts["gate_up"] = _rows(layer["gate_up"], [layer["gate_up"].shape[0] // 2] * 2, rank, tp)
        for part in ("o", "down"):
            parts[part] = layer[part].chunk(tp, dim=1)[rank].contiguous()
        return parts

    return replace(weights, layers=tuple(map(divided, weights.layers)), lm_head=lm_head)


def _rows(matrix: Tensor, sections: list[int], rank: int, tp: int) -> Tensor:
    """The rows of `rank` from each section: those of its heads from q, from k and from v."""
    return torch.cat([part.chunk(tp)[rank] for part in matrix.split(sections)]).contiguous()
