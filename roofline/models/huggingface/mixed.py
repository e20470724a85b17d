"""How do models that mix attention with Mamba-2, delta rules or short convolutions describe themselves?"""

from __future__ import annotations

from collections.abc import Callable

from membound.roofline.models.huggingface.facts import Config, Fields, gqa, model
from membound.roofline.models.huggingface.hybrid import mamba2_mixer
from membound.roofline.models.huggingface.mixture import dense_first, latent, routed, shared_width

_ATTENTION = ("attention", "full_attention")


def _granite_mamba(c: Config) -> Fields:
    heads = c.count("mamba_n_heads", default=128)
    inner = c.get("mamba_d_ssm") or c.count("mamba_expand", default=2) * c.hidden
    head_dim = c.get("mamba_d_head", default="auto")
    return mamba2_mixer(c, heads, inner // heads if head_dim == "auto" else head_dim)


def _attention_at(c: Config, key: str) -> list[bool]:
    """Which layers attend: those that `layer_types` says, or those in the list under `key`."""
    types = c.layer_list("layer_types") or c.layer_list("layers_block_type")
    if types:
        return [kind in _ATTENTION for kind in types]
    indices = c.get(key, default=())
    return [index in indices for index in range(c.layers)]


def granite_hybrid(c: Config) -> Fields:
    """Granite 4: Mamba-2 in most layers, attention in the others, a mixture of experts or one network in all."""
    bias = c.flag("attention_bias")
    attention, mamba = gqa(c, qkv_bias=bias, o_bias=bias), _granite_mamba(c)
    shared = c.count("shared_intermediate_size")
    ffn: Fields = {"kind": "gated", "intermediate": shared}
    if c.get("num_local_experts", default=0):
        ffn = routed(c, intermediate=c.count("intermediate_size"), shared_intermediate=shared)
    mixers = [attention if attends else mamba for attends in _attention_at(c, "attn_layer_indices")]
    return model(c, mixers, ffn)


def bamba(c: Config) -> Fields:
    """Bamba: Mamba-2, and attention in a few layers; one network in all."""
    attention, mamba = gqa(c), _granite_mamba(c)
    mixers = [attention if attends else mamba for attends in _attention_at(c, "attn_layer_indices")]
    return model(c, mixers, {"kind": "gated", "intermediate": c.count("intermediate_size")})


def falcon_h1(c: Config) -> Fields:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    bias = c.flag("attention_bias")
    mamba = _granite_mamba(c) | {"gated_norm": c.flag("mamba_rms_norm")}
    mixer = {"kind": "parallel", "mixers": (gqa(c, qkv_bias=bias, o_bias=bias), mamba)}
    ffn = {"kind": "gated", "intermediate": c.count("intermediate_size"), "bias": c.flag("mlp_bias")}
    return model(c, mixer, ffn)


def lfm2(c: Config) -> Fields:
    """LFM2: gated short convolutions, and attention with norms of q and k in a few layers; dense layers first."""
    attention = gqa(c, qk_norm=True)
    bias = c.flag("conv_bias")
    conv = {
        "kind": "short_conv",
        "channels": c.hidden,
        "conv_width": c.count("conv_L_cache", default=3),
        "bias": bias,
    }
    mixers = [attention if attends else conv for attends in _attention_at(c, "full_attn_idxs")]
    ffns: list[Fields] = [{"kind": "gated", "intermediate": _lfm2_width(c)}] * c.layers
    if c.get("num_experts"):
        first = c.get("num_dense_layers", default=2)
        experts = routed(c, router_bias=c.flag("use_expert_bias", default=True))
        ffns = [ffn if index < first else experts for index, ffn in enumerate(ffns)]
    tied = c.get("tie_word_embeddings", "tie_embedding", default=True)
    return model(c, mixers, ffns, tie_embeddings=tied)


def _lfm2_width(c: Config) -> int:
    """Two thirds of the given width, rounded up, where `block_auto_adjust_ff_dim` asks for it."""
    given = c.count("block_ff_dim", "intermediate_size")
    if not c.flag("block_auto_adjust_ff_dim", default=c.get("num_experts") is None):
        return given
    width = int(c.get("block_ffn_dim_multiplier", default=1.0) * int(2 * given / 3))
    multiple = c.count("block_multiple_of", default=256)
    return -(-width // multiple) * multiple


def kimi_linear(c: Config) -> Fields:
    """Kimi Linear and K3: three layers of delta attention, then one of latent attention; dense layers first.

    In K3 experts work on a narrower projection of the hidden state, and latent attention has a gated output.
    """
    linear = Config(c.get("linear_attn_config", default={}), f"linear_attn_config of {c.name}", c.architecture)
    kda = {
        "kind": "kda",
        "heads": linear.count("num_heads", default=c.count("linear_num_heads", default=c.heads)),
        "head_dim": linear.count("head_dim", default=c.count("linear_head_dim", default=128)),
        "conv_width": linear.count("short_conv_kernel_size", default=c.count("linear_conv_kernel_dim", default=4)),
    }
    full = [index - 1 for index in linear.get("full_attn_layers", default=())]  # counted from 1
    attends = [index in full for index in range(c.layers)] if full else _attention_at(c, "full_attn_layers")
    gate = {"output_gate": c.flag("mla_use_output_gate")}
    mixers = [latent_one | gate if at else kda for latent_one, at in zip(latent(c), attends, strict=True)]
    narrow = c.get("routed_expert_hidden_size")
    experts = routed(c, shared_intermediate=shared_width(c), router_bias=True, latent=narrow)
    return model(c, mixers, dense_first(c, experts))


def bailing_hybrid(c: Config) -> Fields:
    """Ling 2.5 with delta attention: every `layer_group_size`-th layer has latent attention; dense layers first."""
    kda = {
        "kind": "kda",
        "heads": c.heads,
        "head_dim": c.head_dim,
        "conv_width": c.count("short_conv_kernel_size", default=4),
    }
    every = c.count("layer_group_size")
    types = c.layer_list("layer_types")
    attends = (
        [kind in _ATTENTION for kind in types] if types else [(index + 1) % every == 0 for index in range(c.layers)]
    )
    mixers = [latent_one if at else kda for latent_one, at in zip(latent(c), attends, strict=True)]
    experts = routed(c, shared_intermediate=shared_width(c), router_bias=True)
    return model(c, mixers, dense_first(c, experts), mtp_layers=c.get("num_nextn_predict_layers", default=0))


FAMILIES: dict[str, Callable[[Config], Fields]] = {
    "GraniteMoeHybridForCausalLM": granite_hybrid,
    "BambaForCausalLM": bamba,
    "FalconH1ForCausalLM": falcon_h1,
    "Lfm2ForCausalLM": lfm2,
    "Lfm2MoeForCausalLM": lfm2,
    "KimiLinearForCausalLM": kimi_linear,
    "KimiK3ForCausalLM": kimi_linear,
    "KimiK3ForConditionalGeneration": kimi_linear,
    "BailingHybridForCausalLM": bailing_hybrid,
}
