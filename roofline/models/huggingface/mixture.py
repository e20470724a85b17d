"""How do mixtures of experts, and models with latent attention, describe themselves in config.json?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from membound.roofline.models.huggingface.dense import per_layer_input, qwen_windows, sharing_kv
from membound.roofline.models.huggingface.facts import Config, Fields, gqa, model, windowed


def routed(c: Config, **changes: Any) -> Fields:
    """A mixture of experts as most families name it."""
    return {
        "kind": "moe",
        "experts": c.count("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
        "top_k": c.count("num_experts_per_tok", "moe_k", "top_k_experts", "num_experts_per_token", "moe_top_k"),
        "intermediate": changes.get("intermediate") or c.count("moe_intermediate_size", "intermediate_size"),
        **_groups(c),
        **changes,
    }


def _groups(c: Config) -> Fields:
    """Groups of experts, where the router leaves some out (`group_limited_greedy`, `noaux_tc`)."""
    groups = c.get("n_group", default=1) or 1
    if groups == 1 or c.get("topk_method") == "greedy":
        return {}
    return {"groups": groups, "groups_taken": c.get("topk_group", default=groups)}


def _gated(c: Config, *keys: str) -> Fields:
    return {"kind": "gated", "intermediate": c.count(*(keys or ("intermediate_size",)))}


def mixtral(c: Config) -> Fields:
    return model(c, windowed(gqa(c), c.windows(pattern=True)), routed(c, intermediate=c.count("intermediate_size")))


def qwen2_moe(c: Config) -> Fields:
    """Qwen1.5-MoE, Qwen2-57B-A14B: a shared expert behind a gate, biases of q, k and v."""
    shared = c.get("shared_expert_intermediate_size", default=0)
    experts = routed(c, shared_intermediate=shared, shared_gate=bool(shared))
    attention = gqa(c, qkv_bias=c.flag("qkv_bias", default=True))
    return model(c, windowed(attention, qwen_windows(c)), sparse_steps(c, experts))


def qwen3_moe(c: Config) -> Fields:
    bias = c.flag("attention_bias")
    attention = gqa(c, qkv_bias=bias, o_bias=bias, qk_norm=True, head_dim=c.count("head_dim", default=128))
    return model(c, windowed(attention, qwen_windows(c)), sparse_steps(c, routed(c)))


def sparse_steps(c: Config, experts: Fields) -> list[Fields]:
    """Qwen's layers: experts in every `decoder_sparse_step`-th, but for those in `mlp_only_layers`."""
    dense_layers, step = c.get("mlp_only_layers", default=[]), c.count("decoder_sparse_step", default=1)
    return [
        experts if index not in dense_layers and (index + 1) % step == 0 else _gated(c) for index in range(c.layers)
    ]


def dense_first(c: Config, experts: Fields) -> list[Fields]:
    """DeepSeek's layers: the first ones dense, then experts in every `moe_layer_freq`-th (or where a list says so)."""
    frequency, types = c.get("moe_layer_freq", default=1), c.layer_list("mlp_layer_types")
    if types:
        sparse = [kind == "sparse" for kind in types]
    elif isinstance(frequency, list):
        sparse = [bool(mark) for mark in c.layer_list("moe_layer_freq") or []]
    else:
        first = c.get("first_k_dense_replace", default=0)
        sparse = [index >= first and index % frequency == 0 for index in range(c.layers)]
    return [experts if mark else _gated(c) for mark in sparse]


def shared_width(c: Config) -> int:
    """The width of all shared experts, each as wide as a routed one."""
    return int(c.get("n_shared_experts", "num_shared_experts", default=0)) * c.count("moe_intermediate_size")


def deepseek(c: Config) -> Fields:
    """DeepSeek V2, V3, V3.2, Kimi K2, GLM-5: latent attention, dense layers first, shared experts."""
    usual = "noaux_tc" if c.architecture in ("DeepseekV3ForCausalLM", "AXK1ForCausalLM") else None
    balanced = c.get("topk_method", default=usual) == "noaux_tc"
    experts = routed(c, shared_intermediate=shared_width(c), router_bias=balanced)
    return model(c, latent(c), dense_first(c, experts))


def latent(c: Config) -> list[Fields]:
    """Latent attention as DeepSeek names it, one a layer, which differ in their indexers."""
    attention: Fields = {
        "kind": "mla",
        "heads": c.heads,
        "q_lora_rank": c.get("q_lora_rank"),
        "kv_lora_rank": c.count("kv_lora_rank"),
        "qk_nope_head_dim": c.count("qk_nope_head_dim"),
        "qk_rope_head_dim": c.count("qk_rope_head_dim"),
        "v_head_dim": c.count("v_head_dim"),
    }
    if c.get("index_topk") is None:
        return [attention] * c.layers
    indexer = {"heads": c.count("index_n_heads"), "head_dim": c.count("index_head_dim"), "top_k": c.count("index_topk")}
    types = c.layer_list("indexer_types") or ["full"] * c.layers
    return [attention | {"indexer": indexer | {"shared": kind == "shared"}} for kind in types]


def deepseek_moe(c: Config) -> Fields:
    """DeepSeekMoE-16B (V1): usual attention."""
    return model(c, gqa(c), dense_first(c, routed(c, shared_intermediate=shared_width(c))))


def glm4_moe(c: Config) -> Fields:
    """GLM-4.5 and later: grouped-query attention with biases of q, k and v, dense layers first."""
    attention = gqa(c, qkv_bias=c.flag("attention_bias"), qk_norm=c.flag("use_qk_norm"))
    return model(c, attention, dense_first(c, routed(c, shared_intermediate=shared_width(c), router_bias=True)))


def gpt_oss(c: Config) -> Fields:
    """gpt-oss: biases everywhere, learned sinks, and a window on every second layer."""
    bias = c.flag("attention_bias", default=True)
    attention = gqa(c, qkv_bias=bias, o_bias=bias, sinks=True)
    windows = c.windows([index % 2 == 0 for index in range(c.layers)])
    experts = routed(c, intermediate=c.count("intermediate_size"), router_bias=True, expert_bias=True)
    return model(c, windowed(attention, windows), experts)


def llama4(c: Config) -> Fields:
    """Llama 4: three of four layers attend within a chunk; experts in every n-th layer, beside a shared one."""
    pattern = c.layer_list("no_rope_layers") or [(index + 1) % 4 != 0 for index in range(c.layers)]
    step = c.count("interleave_moe_layer_step", default=1)
    sparse = c.get("moe_layers") or range(step - 1, c.layers, step)
    width = c.count("intermediate_size")
    experts = routed(c, intermediate=width, shared_intermediate=width)
    ffns = [experts if index in sparse else _gated(c, "intermediate_size_mlp") for index in range(c.layers)]
    return model(c, windowed(gqa(c), c.windows([bool(mark) for mark in pattern])), ffns)


def phi_moe(c: Config) -> Fields:
    """Phi-3.5-MoE: layer norms and biases in attention."""
    bias = c.flag("attention_bias")
    attention = gqa(c, qkv_bias=bias, o_bias=bias)
    experts = routed(c, intermediate=c.count("intermediate_size"))
    head_bias = c.flag("lm_head_bias")
    return model(c, windowed(attention, c.windows(pattern=True)), experts, norm="layer", lm_head_bias=head_bias)


def dbrx(c: Config) -> Fields:
    """DBRX: the facts stand in `attn_config` and `ffn_config`."""
    inner = Config(c.need("ffn_config"), f"ffn_config of {c.name}", c.architecture)
    attention_facts = Config(c.need("attn_config"), f"attn_config of {c.name}", c.architecture)
    experts = routed(inner, intermediate=inner.count("ffn_hidden_size"))
    attention = gqa(c, kv_heads=attention_facts.count("kv_n_heads"))
    theta = attention_facts.get("rope_theta", default=10000.0)
    return model(c, attention, experts, norm="layer_without_bias", rope_theta=theta)


def minimax_m2(c: Config) -> Fields:
    """MiniMax-M2: norms of all q and of all k, a bias that balances the router."""
    over = "heads" if c.get("qk_norm_type") == "per_layer" else "head"
    attention = gqa(c, qk_norm=c.flag("use_qk_norm"), qk_norm_over=over)
    shared = c.get("shared_intermediate_size", default=0)
    experts = routed(c, shared_intermediate=shared, router_bias=c.flag("use_routing_bias"))
    mtp = c.get("num_mtp_modules", default=0) if c.flag("use_mtp") else 0
    fraction = c.count("rotary_dim", default=c.head_dim) / c.head_dim
    return model(c, attention, experts, mtp_layers=mtp, rotary_fraction=fraction)


def olmoe(c: Config) -> Fields:
    return model(c, gqa(c, qk_norm=True, qk_norm_over="heads"), routed(c))


def granite_moe(c: Config) -> Fields:
    bias = c.flag("attention_bias")
    shared = c.get("shared_intermediate_size", default=0)
    return model(c, gqa(c, qkv_bias=bias, o_bias=bias), routed(c, shared_intermediate=shared))


def ernie_moe(c: Config) -> Fields:
    """ERNIE 4.5: dense layers first, shared experts as wide as routed ones."""
    bias = c.flag("use_bias")
    shared = int(c.get("moe_num_shared_experts", default=0)) * c.count("moe_intermediate_size")
    experts = routed(c, shared_intermediate=shared, router_bias=c.flag("moe_use_aux_free", default=True))
    first, last = c.get("moe_layer_start_index", default=0), c.get("moe_layer_end_index", default=-1)
    last = c.layers - 1 if last < 0 else last
    ffns = [experts if first <= index <= last else _gated(c) for index in range(c.layers)]
    return model(c, gqa(c, qkv_bias=bias, o_bias=bias), ffns)


def mimo_v2(c: Config) -> Fields:
    """MiMo-V2: V heads narrower than K heads, windowed layers with KV heads and sinks of their own."""
    full = gqa(c, v_head_dim=c.count("v_head_dim"), sinks=c.flag("add_full_attention_sink_bias"))
    windowed_layer = {
        "kind": "gqa",
        "heads": c.count("swa_num_attention_heads", default=c.heads),
        "kv_heads": c.count("swa_num_key_value_heads", default=c.kv_heads),
        "head_dim": c.count("swa_head_dim", default=c.head_dim),
        "v_head_dim": c.count("swa_v_head_dim", "v_head_dim"),
        "window": c.window,
        "sinks": c.flag("add_swa_attention_sink_bias"),
    }
    marks = c.layer_list("hybrid_layer_pattern") or [0] * c.layers
    attentions = [windowed_layer if mark else full for mark in marks]
    return model(c, attentions, dense_first(c, routed(c, router_bias=c.get("topk_method") == "noaux_tc")))


def gemma4(c: Config) -> Fields:
    """Gemma 4: full layers have wider heads, in the large ones fewer of them for K, and no V projection.

    Experts stand beside a dense part. Small ones have Gemma 3n's inputs of layers, and layers that share K and V.
    """
    local = gqa(c, qk_norm=True)
    alike = c.flag("attention_k_eq_v")
    full = local | {
        "head_dim": c.count("global_head_dim", default=c.head_dim),
        "kv_heads": c.count("num_global_key_value_heads", default=c.kv_heads) if alike else c.kv_heads,
        "v_is_k": alike,
    }
    windows = c.windows([(index + 1) % 6 != 0 for index in range(c.layers)])
    attentions = sharing_kv(c, [local | {"window": window} if window else full for window in windows])
    ffn = _gated(c)
    if c.flag("enable_moe_block"):
        ffn = routed(c, shared_intermediate=ffn["intermediate"])
    ffns = [ffn] * c.layers
    if c.flag("use_double_wide_mlp"):
        wide = ffn | {"intermediate": 2 * ffn["intermediate"]}
        ffns = [wide if one.get("shares_kv") else ffn for one in attentions]
    tied = c.get("tie_word_embeddings", default=True)
    inputs = per_layer_input(c)
    return model(c, attentions, ffns, norms_per_layer=4, tie_embeddings=tied, per_layer_input=inputs)


FAMILIES: dict[str, Callable[[Config], Fields]] = {
    "MixtralForCausalLM": mixtral,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen3VLMoeForConditionalGeneration": qwen3_moe,
    "DeepseekForCausalLM": deepseek_moe,
    "DeepseekV2ForCausalLM": deepseek,
    "DeepseekV3ForCausalLM": deepseek,
    "DeepseekV32ForCausalLM": deepseek,
    "KimiK25ForConditionalGeneration": deepseek,
    "AXK1ForCausalLM": deepseek,
    "GlmMoeDsaForCausalLM": deepseek,
    "Glm4MoeForCausalLM": glm4_moe,
    "GptOssForCausalLM": gpt_oss,
    "Llama4ForCausalLM": llama4,
    "Llama4ForConditionalGeneration": llama4,
    "PhiMoEForCausalLM": phi_moe,
    "PhimoeForCausalLM": phi_moe,
    "DbrxForCausalLM": dbrx,
    "MiniMaxM2ForCausalLM": minimax_m2,
    "OlmoeForCausalLM": olmoe,
    "GraniteMoeForCausalLM": granite_moe,
    "GraniteMoeSharedForCausalLM": granite_moe,
    "Ernie4_5_MoeForCausalLM": ernie_moe,
    "MiMoV2FlashForCausalLM": mimo_v2,
    "Gemma4ForCausalLM": gemma4,
    "Gemma4ForConditionalGeneration": gemma4,
}
