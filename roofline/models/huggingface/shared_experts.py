"""How do mixtures that have shared experts, or a dense network beside the routed ones, describe themselves?"""

from __future__ import annotations

from collections.abc import Callable

from membound.roofline.models.huggingface.facts import Config, Fields, gqa, model, windowed
from membound.roofline.models.huggingface.mixture import dense_first, latent, routed, shared_width


def bailing(c: Config) -> Fields:
    """Ling and Ring: grouped-query attention, dense layers first, shared experts."""
    norms, bias = c.flag("use_qk_norm"), c.flag("use_bias")
    attention = gqa(c, qkv_bias=c.flag("use_qkv_bias"), o_bias=bias, qk_norm=norms)
    balanced = c.flag("moe_router_enable_expert_bias")
    return model(c, attention, dense_first(c, routed(c, shared_intermediate=shared_width(c), router_bias=balanced)))


def dots1(c: Config) -> Fields:
    """dots.llm1: norms of q and k, dense layers first, shared experts."""
    bias = c.flag("attention_bias")
    attention = gqa(c, qkv_bias=bias, o_bias=bias, qk_norm=True)
    experts = routed(c, shared_intermediate=shared_width(c), router_bias=True)
    return model(c, windowed(attention, c.windows()), dense_first(c, experts))


def solar_open(c: Config) -> Fields:
    """Solar Open: experts in every layer unless the first ones are dense."""
    experts = routed(c, shared_intermediate=shared_width(c), router_bias=True)
    return model(c, gqa(c, qkv_bias=c.flag("attention_bias")), dense_first(c, experts))


def hy_v3(c: Config) -> Fields:
    """Hunyuan 3: norms of q and k, dense layers first."""
    experts = routed(c, shared_intermediate=shared_width(c), router_bias=True)
    return model(c, gqa(c, qk_norm=True), _dense_by_type(c, experts, "first_k_dense_replace", 1))


def exaone_moe(c: Config) -> Fields:
    """K-EXAONE: three windowed layers, then one that sees everything; norms of q and k, dense layers first."""
    windows = c.windows([(index + 1) % 4 != 0 for index in range(c.layers)])
    experts = routed(c, shared_intermediate=shared_width(c), router_bias=True)
    ffns = _dense_by_type(c, experts, "first_k_dense_replace", 1)
    return model(c, windowed(gqa(c, qk_norm=True), windows), ffns)


def afmoe(c: Config) -> Fields:
    """Trinity: windowed layers but for every fourth, gated output, four norms a layer, dense layers first."""
    every = c.count("global_attn_every_n_layers", default=4)
    windows = c.windows([(index + 1) % every != 0 for index in range(c.layers)])
    attention = gqa(c, qk_norm=True, output_gate=True)
    experts = routed(c, shared_intermediate=shared_width(c), router_bias=True)
    ffns = _dense_by_type(c, experts, "num_dense_layers", 1)
    return model(c, windowed(attention, windows), ffns, norms_per_layer=4)


def _dense_by_type(c: Config, experts: Fields, key: str, usual: int) -> list[Fields]:
    """As `dense_first`, where so many first layers are dense unless a list or `key` says otherwise."""
    if c.get("mlp_layer_types") is not None:
        return dense_first(c, experts)
    first = c.get(key, default=usual)
    return [
        {"kind": "gated", "intermediate": c.count("intermediate_size")} if index < first else experts
        for index in range(c.layers)
    ]


def minimax_m3(c: Config) -> Fields:
    """MiniMax-M3: light heads choose blocks of tokens in all but the first layers; dense layers first."""
    attention = gqa(c, qk_norm=c.flag("use_qk_norm", default=True))
    sparse = Config(
        c.get("sparse_attention_config", default={}), f"sparse_attention_config of {c.name}", c.architecture
    )
    block = sparse.count("sparse_block_size", default=c.count("index_block_size", default=128))
    indexer = {
        "heads": sparse.count("sparse_num_index_heads", default=c.count("index_n_heads", default=4)),
        "head_dim": sparse.count("sparse_index_dim", default=c.count("index_head_dim", default=128)),
        "top_k": block * sparse.count("sparse_topk_blocks", default=c.count("index_topk_blocks", default=16)),
        "head_weights": False,
        "key_format": "bf16",
    }
    marks = sparse.get("sparse_attention_freq") or [
        kind != "full_attention" for kind in c.layer_list("layer_types") or ()
    ]
    if len(marks) != c.layers:
        raise c.unsupported("sparse_attention_config", "sparse_attention_freq must have one entry for each layer")
    attentions = [attention | {"indexer": indexer} if mark else attention for mark in marks]
    shared = c.count("shared_intermediate_size", "moe_intermediate_size", "intermediate_size")
    experts = routed(c, shared_intermediate=shared, router_bias=c.flag("use_routing_bias", default=True))
    wide = Config({**c.fields, "intermediate_size": c.count("dense_intermediate_size")}, c.name, c.architecture)
    fraction = c.count("rotary_dim", default=c.head_dim) / c.head_dim
    mtp = c.get("num_nextn_predict_layers", default=0)
    return model(c, attentions, dense_first(wide, experts), rotary_fraction=fraction, mtp_layers=mtp)


def grok(c: Config) -> Fields:
    """Grok 1 and 2: four norms a layer; in Grok 2 a dense network stands beside the experts."""
    width = c.count("moe_intermediate_size", "intermediate_size")
    beside = c.count("intermediate_size") if c.flag("residual_moe") else 0
    experts = {
        "kind": "moe",
        "experts": c.count("num_local_experts", "num_experts"),
        "top_k": c.count("num_experts_per_tok", "num_selected_experts"),
        "intermediate": width,
        "shared_intermediate": beside,
    }
    return model(c, gqa(c), experts, norms_per_layer=4)


def arctic(c: Config) -> Fields:
    """Arctic: experts beside a dense network as wide as the hidden state, in every `moe_layer_frequency`-th layer."""
    every = c.count("moe_layer_frequency", default=2)
    experts = routed(c, shared_intermediate=c.hidden if c.flag("use_residual", default=True) else 0)
    dense = {"kind": "gated", "intermediate": c.count("intermediate_size")}
    ffns = [experts if (index + 1) % every == 0 else dense for index in range(c.layers)]
    return model(c, gqa(c), ffns, norms_per_layer=3)


def hunyuan_moe(c: Config) -> Fields:
    """Hunyuan Large and A13B: norms of q and k; facts that differ between layers are lists, which must be equal."""

    def one(key: str, default: int) -> int:
        value = c.get(key, default=default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int):
            raise c.unsupported(key, "it must be one number for all layers")
        return value

    width = one("moe_intermediate_size", c.count("intermediate_size"))
    shared = width * (one("num_shared_expert", 1) if c.flag("use_mixed_mlp_moe", default=True) else 0)
    experts = {
        "kind": "moe",
        "experts": c.count("num_experts"),
        "top_k": one("moe_topk", 1),
        "intermediate": width,
        "shared_intermediate": shared,
    }
    tied = c.get("tie_word_embeddings", default=True)
    return model(c, gqa(c, qk_norm=c.flag("use_qk_norm", default=True)), experts, tie_embeddings=tied)


def longcat(c: Config) -> Fields:
    """LongCat-Flash: a layer is twice latent attention and a dense network; experts span from the first to the end.

    Experts whose work is done beside the first dense network and the second attention cost as if they stood beside
    the first network alone. Some of a token's experts compute nothing.
    """
    layers = c.count("num_layers", "num_hidden_layers")
    flat = Config({**c.fields, "num_hidden_layers": 2 * layers}, c.name, c.architecture)
    dense = {"kind": "gated", "intermediate": c.count("ffn_hidden_size", "intermediate_size")}
    experts = {
        "kind": "moe",
        "experts": c.count("n_routed_experts"),
        "top_k": c.count("moe_topk", "num_experts_per_tok"),
        "intermediate": c.count("expert_ffn_hidden_size", "moe_intermediate_size"),
        "shared_intermediate": dense["intermediate"],
        "router_bias": True,
        "zero_experts": c.get("zero_expert_num", default=0),
    }
    return model(flat, latent(flat), [experts, dense] * layers, layers=2 * layers)


def step3(c: Config) -> Fields:
    """Step-3: one KV head for all, q through a narrow projection; experts beside a shared one in the listed layers."""
    attention = gqa(c, kv_heads=c.count("num_attention_groups", default=1), q_lora_rank=c.count("share_q_dim"))
    experts = {
        "kind": "moe",
        "experts": c.count("moe_num_experts"),
        "top_k": c.count("moe_top_k"),
        "intermediate": c.count("moe_intermediate_size"),
        "shared_intermediate": c.count("share_expert_dim", "share_expert_dims"),
    }
    return model(c, attention, _step_layers(c, experts, first=4))


def step3p5(c: Config) -> Fields:
    """Step-3.5 and 3.7 Flash: windowed layers with heads of their own, experts beside a shared one; dense layers first.

    The gate of each head, which has one row of the projection, is left out.
    """
    bias = c.flag("attention_bias")
    full = gqa(c, kv_heads=c.count("num_attention_groups", "num_key_value_heads"), qkv_bias=bias, qk_norm=True)
    other = c.get("attention_other_setting", default={})
    heads = other.get("num_attention_heads") or c.count("num_sliding_attention_heads", default=c.heads)
    windows = c.windows([index % 4 != 0 for index in range(c.layers)])
    attentions = [full | {"heads": heads, "window": window} if window else full for window in windows]
    experts = routed(
        Config(
            {**c.fields, "n_routed_experts": c.count("n_routed_experts", "moe_num_experts", "num_experts")},
            c.name,
            c.architecture,
        ),
        shared_intermediate=c.count("share_expert_dim", "share_expert_dims"),
        router_bias=True,
    )
    return model(c, attentions, _step_layers(c, experts, first=3), mtp_layers=0)


def _step_layers(c: Config, experts: Fields, first: int) -> list[Fields]:
    """Experts in the layers that `moe_layers_enum` lists ("4,5,6"), else in all but the first ones."""
    listed = c.get("moe_layers_enum")
    if listed is not None:
        parts = listed.split(",") if isinstance(listed, str) else listed
        sparse = {int(index) for index in parts}
    else:
        sparse = set(range(first, c.layers))
    dense = {"kind": "gated", "intermediate": c.count("intermediate_size")}
    return [experts if index in sparse else dense for index in range(c.layers)]


FAMILIES: dict[str, Callable[[Config], Fields]] = {
    "BailingMoeForCausalLM": bailing,
    "BailingMoeV2ForCausalLM": bailing,
    "Dots1ForCausalLM": dots1,
    "SolarOpenForCausalLM": solar_open,
    "HYV3ForCausalLM": hy_v3,
    "ExaoneMoeForCausalLM": exaone_moe,
    "AfmoeForCausalLM": afmoe,
    "MiniMaxM3ForCausalLM": minimax_m3,
    "MiniMaxM3VLForCausalLM": minimax_m3,
    "MiniMaxM3SparseForConditionalGeneration": minimax_m3,
    "Grok1ForCausalLM": grok,
    "Grok1ModelForCausalLM": grok,
    "ArcticForCausalLM": arctic,
    "HunYuanMoEV1ForCausalLM": hunyuan_moe,
    "LongcatFlashForCausalLM": longcat,
    "LongcatCausalLM": longcat,
    "Step3TextForCausalLM": step3,
    "Step3VLForConditionalGeneration": step3,
    "Step3p5ForCausalLM": step3p5,
    "Step3p7FlashForCausalLM": step3p5,
    "Step3p7ForConditionalGeneration": step3p5,
}
