"""Which tensors does a model have, by which names and in which shapes?

Matrices have the names and shapes of `roofline.models`; this adds what costs next to nothing: norms, biases, decays.
"""

from __future__ import annotations

from collections.abc import Iterator

from membound.roofline.models import GatedFfn, GroupedQueryAttention, LatentAttention, ModelSpec, MoeFfn
from membound.roofline.models.ffn import ChannelMix, DenseFfn
from membound.roofline.models.layers import Attention, Ffn, Layer
from membound.roofline.models.recurrent import GatedDeltaNet, Mamba1, Mamba2, Rwkv6, Rwkv7
from membound.runtime.arithmetic import Arithmetic

Shapes = dict[str, tuple[int, ...]]

# which norms a layer has for its mixer and for its network, by where they stand
_NORMS = {
    "before": ("norm",),
    "after": ("post_norm",),
    "around": ("norm", "post_norm"),
    "parallel": ("norm",),
}


def matrix_shapes(layer: Layer, hidden: int) -> Shapes:
    """The matrices [n, k] of a layer, its routed experts' too."""
    shapes = layer.attention.linears(hidden) + layer.ffn.linears(hidden)
    found: Shapes = {name: (n, k) for name, n, k in shapes}
    if isinstance(layer.ffn, MoeFfn):
        of_expert = layer.ffn.expert_linears(hidden)
        found |= {f"experts.{e}.{name}": (n, k) for e in range(layer.ffn.experts) for name, n, k in of_expert}
    return found


def vector_shapes(spec: ModelSpec, layer: Layer, arithmetic: Arithmetic) -> Shapes:
    """What a layer has besides its matrices."""
    shapes = dict(_norms(spec, layer, arithmetic))
    shapes |= _mixer_vectors(layer.attention, spec.hidden)
    return shapes | _ffn_vectors(layer.ffn, spec.hidden)


def extra_shapes(spec: ModelSpec) -> Shapes:
    """What a model has beside its layers, its tables and the weight of its last norm."""
    biased = spec.norm == "layer"
    shapes: Shapes = {"final_norm_bias": (spec.hidden,)} if biased else {}
    if spec.embedding_norm:
        shapes |= {"embedding_norm": (spec.hidden,)} | ({"embedding_norm_bias": (spec.hidden,)} if biased else {})
    if spec.position_rows:
        shapes["positions"] = (spec.position_rows, spec.hidden)
    if spec.lm_head_bias:
        shapes["lm_head_bias"] = (spec.vocab,)
    return shapes


def _norms(spec: ModelSpec, layer: Layer, arithmetic: Arithmetic) -> Iterator[tuple[str, tuple[int, ...]]]:
    if spec.norm == "unscaled":
        return
    parts = [name for name, part in (("mixer", layer.attention), ("ffn", layer.ffn)) if part.kind != "none"]
    if arithmetic.placement == "parallel" and spec.norms_per_layer == 1:
        parts = parts[:1]
    for part in parts:
        for kind in _NORMS[arithmetic.placement]:
            yield f"{part}_{kind}", (spec.hidden,)
            if spec.norm == "layer":
                yield f"{part}_{kind}_bias", (spec.hidden,)


def _mixer_vectors(mixer: Attention, hidden: int) -> Shapes:
    if isinstance(mixer, GroupedQueryAttention):
        return _attention_vectors(mixer, hidden)
    if isinstance(mixer, LatentAttention):
        shapes: Shapes = {"kv_a_norm": (mixer.kv_lora_rank,)}
        return shapes | ({"q_a_norm": (mixer.q_lora_rank,)} if mixer.q_lora_rank else {})
    if isinstance(mixer, Mamba2):
        per_head = dict.fromkeys(("a", "d", "dt_bias"), (mixer.heads,))
        shapes = {"conv": (mixer.conv_channels, mixer.conv_width), "conv_bias": (mixer.conv_channels,), **per_head}
        if mixer.gated_norm:
            shapes["gated_norm"] = (mixer.d_inner,)
        rows = mixer.linears(hidden)[0].n
        return shapes | ({"in_proj_bias": (rows,), "out_proj_bias": (hidden,)} if mixer.bias else {})
    if isinstance(mixer, Mamba1):
        inner = mixer.d_inner
        shapes = {"conv": (inner, mixer.conv_width), "conv_bias": (inner,), "dt_bias": (inner,), "d": (inner,)}
        shapes["a"] = (inner, mixer.d_state)
        norms = {"dt_norm": (mixer.dt_rank,), "b_norm": (mixer.d_state,), "c_norm": (mixer.d_state,)}
        return shapes | (norms if mixer.inner_norms else {})
    if isinstance(mixer, GatedDeltaNet):
        return {
            "conv": (mixer.conv_channels, mixer.conv_width),
            "a": (mixer.value_heads,),
            "dt_bias": (mixer.value_heads,),
            "gated_norm": (mixer.value_head_dim,),
        }
    if isinstance(mixer, Rwkv6):
        grouped = dict.fromkeys(("group_norm", "group_norm_bias", "decay"), (mixer.width,))
        return {"shift": (6, hidden), "bonus": (mixer.heads, mixer.head_dim), **grouped}
    if isinstance(mixer, Rwkv7):
        names = ("group_norm", "group_norm_bias", "decay", "rate", "value", "k_k", "k_a", "r_k")
        return {"shift": (6, hidden), **dict.fromkeys(names, (mixer.width,))}
    return {}


def _attention_vectors(a: GroupedQueryAttention, hidden: int) -> Shapes:
    shapes: Shapes = {}
    if a.qkv_bias:
        shapes["qkv_bias"] = (a.qkv_rows,)
    if a.o_bias:
        shapes["o_bias"] = (hidden,)
    if a.qk_norm:
        q_heads, k_heads = (a.heads, a.kv_heads) if a.qk_norm_over == "heads" else (1, 1)
        shapes |= {"q_norm": (q_heads * a.head_dim,), "k_norm": (k_heads * a.head_dim,)}
    return shapes | ({"sinks": (a.heads,)} if a.sinks else {})


def _ffn_vectors(ffn: Ffn, hidden: int) -> Shapes:
    if isinstance(ffn, GatedFfn | DenseFfn) and ffn.bias:
        return {f"{name}_bias": (n,) for name, n, _ in ffn.linears(hidden)}
    if isinstance(ffn, ChannelMix):
        return {"ffn_shift": (1 + ffn.receptance, hidden)}
    if not isinstance(ffn, MoeFfn):
        return {}
    shapes: Shapes = {"router_bias": (ffn.experts,)} if ffn.router_bias else {}
    if ffn.expert_bias:
        of_expert = ffn.expert_linears(hidden)
        shapes |= {f"experts.{e}.{name}_bias": (n,) for e in range(ffn.experts) for name, n, _ in of_expert}
    return shapes
