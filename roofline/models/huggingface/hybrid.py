"""How do state-space models, RWKV, linear attention and their mixtures describe themselves in config.json?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from membound.roofline.models.huggingface.facts import Config, Fields, gqa, model
from membound.roofline.models.huggingface.mixture import sparse_steps

# What "unlimited" is written as: a state has no longest context.
UNLIMITED_CONTEXT = 1 << 20


def state_bits(c: Config, *keys: str) -> int:
    """The precision of the state: fp32 unless the config says otherwise."""
    return 32 if str(c.get(*keys, default="float32")) == "float32" else 16


def _recurrent_model(c: Config, mixer: Fields, ffn: Fields, **changes: Any) -> Fields:
    context = c.count("max_position_embeddings", default=UNLIMITED_CONTEXT)
    return model(c, mixer, ffn, max_context=context, **changes)


def _mamba1(c: Config, **changes: Any) -> Fields:
    hidden = c.hidden
    rank = c.get("time_step_rank", "mamba_dt_rank", default="auto")
    inner = c.get("intermediate_size", "d_inner") if c.architecture != "JambaForCausalLM" else None
    return {
        "kind": "mamba1",
        "d_inner": inner or c.count("expand", "mamba_expand", default=2) * hidden,
        "d_state": c.count("state_size", "mamba_d_state", default=16),
        "dt_rank": -(-hidden // 16) if rank == "auto" else rank,
        "conv_width": c.count("conv_kernel", "mamba_d_conv", default=4),
        **changes,
    }


def mamba1(c: Config) -> Fields:
    tied = c.get("tie_word_embeddings", default=True)
    return _recurrent_model(c, _mamba1(c), {"kind": "none"}, tie_embeddings=tied)


def mamba2_mixer(c: Config, heads: int, head_dim: int) -> Fields:
    """A Mamba-2 mixer of so many heads, in any of the names that families have for its facts."""
    return {
        "kind": "mamba2",
        "heads": heads,
        "head_dim": head_dim,
        "d_state": c.count("ssm_state_size", "state_size", "d_state", "mamba_d_state", default=128),
        "groups": c.count("n_groups", "ngroups", "mamba_n_groups", default=1),
        "conv_width": c.count("conv_kernel", "d_conv", "mamba_d_conv", default=4),
        "state_bits": state_bits(c, "mamba_ssm_cache_dtype"),
        "bias": c.flag("use_bias", "mamba_proj_bias"),
    }


def mamba2(c: Config) -> Fields:
    """Mamba-2, also in the words of its authors' own config (`ssm_cfg`, vocabulary padded to a multiple)."""
    own = Config(c.fields | c.get("ssm_cfg", default={}), c.name, c.architecture)
    head_dim = own.count("head_dim", "headdim", default=64)
    inner = own.count("expand", default=2) * own.hidden
    heads = own.count("num_heads", default=inner // head_dim)
    multiple = own.count("pad_vocab_size_multiple", default=1)
    return _recurrent_model(
        c,
        mamba2_mixer(own, heads, head_dim),
        {"kind": "none"},
        vocab=-(-own.count("vocab_size") // multiple) * multiple,
        tie_embeddings=own.get("tie_word_embeddings", "tie_embeddings", default=True),
    )


def rwkv6(c: Config) -> Fields:
    """RWKV-6 (Finch). Its low ranks are twice as large from 4096 hidden elements on."""
    head_dim = c.count("head_size", "head_dim", default=64)
    ranks = (64, 128) if c.hidden >= 4096 else (32, 64)
    mixer = {
        "kind": "rwkv6",
        "heads": c.hidden // head_dim,
        "head_dim": head_dim,
        "shift_rank": ranks[0],
        "decay_rank": ranks[1],
    }
    width = c.count("intermediate_size", default=int(c.hidden * 3.5) // 32 * 32)
    ffn = {"kind": "channel_mix", "intermediate": width, "receptance": True}
    return _recurrent_model(c, mixer, ffn, norm="layer", embedding_norm=True)


def rwkv7(c: Config) -> Fields:
    """RWKV-7 (Goose). Ranks that are not given follow the width, in steps of 32."""
    head_dim = c.count("head_dim", "head_size", default=64)
    width = float(c.hidden)

    def rank(key: str, typical: float) -> int:
        return c.count(key, default=max(32, round(typical / 32) * 32))

    mixer = {
        "kind": "rwkv7",
        "heads": c.hidden // head_dim,
        "head_dim": head_dim,
        "decay_rank": rank("decay_low_rank_dim", 1.8 * width**0.5),
        "rate_rank": rank("a_low_rank_dim", 1.8 * width**0.5),
        "value_rank": rank("v_low_rank_dim", 1.3 * width**0.5),
        "gate_rank": rank("gate_low_rank_dim", 0.6 * width**0.8),
    }
    ffn = {
        "kind": "channel_mix",
        "intermediate": c.count("intermediate_size", default=4 * c.hidden),
        "receptance": False,
    }
    return _recurrent_model(c, mixer, ffn, norm="layer", embedding_norm=True)


def jamba(c: Config) -> Fields:
    """Jamba: attention in one layer of eight, experts in every second."""
    attention_period, expert_period = c.count("attn_layer_period", default=8), c.count("expert_layer_period", default=2)
    attention_offset, expert_offset = c.get("attn_layer_offset", default=4), c.get("expert_layer_offset", default=1)
    mixer = _mamba1(c, inner_norms=True)
    experts = {
        "kind": "moe",
        "experts": c.count("num_experts", default=16),
        "top_k": c.count("num_experts_per_tok", default=2),
        "intermediate": c.count("intermediate_size"),
    }
    gated = {"kind": "gated", "intermediate": c.count("intermediate_size")}
    dense_only = experts["experts"] == 1
    return model(
        c,
        [gqa(c) if index % attention_period == attention_offset else mixer for index in range(c.layers)],
        [experts if index % expert_period == expert_offset and not dense_only else gated for index in range(c.layers)],
    )


def nemotron_h(c: Config) -> Fields:
    """Nemotron-H: each layer is a Mamba-2, an attention, a network or a mixture of experts."""
    names = {"mamba": "M", "attention": "*", "moe": "E", "mlp": "-"}
    pattern = c.get("hybrid_override_pattern") or "".join(names.get(kind, "?") for kind in c.need("layers_block_type"))
    if set(pattern) - set("M*-E") or c.get("num_hidden_layers", default=len(pattern)) != len(pattern):
        raise c.unsupported("hybrid_override_pattern", "it must have one of M, *, - and E for each layer")
    bias, none = c.flag("attention_bias"), {"kind": "none"}
    mixers = {
        "M": mamba2_mixer(c, c.count("mamba_num_heads"), c.count("mamba_head_dim")),
        "*": gqa(c, qkv_bias=bias, o_bias=bias),
    }
    ffns: dict[str, Fields] = {
        "-": {"kind": "dense", "intermediate": c.get("intermediate_size"), "bias": c.flag("mlp_bias")}
    }
    if "E" in pattern:
        ffns["E"] = {
            "kind": "moe",
            "experts": c.count("n_routed_experts"),
            "top_k": c.count("num_experts_per_tok"),
            "intermediate": c.count("moe_intermediate_size"),
            "shared_intermediate": c.get("n_shared_experts", default=0)
            * c.get("moe_shared_expert_intermediate_size", default=0),
            "gated": False,
            "router_bias": True,
            "latent": c.get("moe_latent_size"),
        }
    return model(
        c,
        [mixers.get(mark, none) for mark in pattern],
        [ffns.get(mark, none) for mark in pattern],
        layers=len(pattern),
        mtp_layers=0,  # its drafting layer is of two kinds that do not end the stack
    )


def qwen3_next(c: Config) -> Fields:
    """Qwen3-Next and Qwen3.5: three layers of gated delta rule, then one of attention with a gated output."""
    bias = c.flag("attention_bias")
    attention = gqa(c, qkv_bias=bias, o_bias=bias, qk_norm=True, output_gate=True)
    mixer = {
        "kind": "gated_delta_net",
        "key_heads": c.count("linear_num_key_heads"),
        "value_heads": c.count("linear_num_value_heads"),
        "key_head_dim": c.count("linear_key_head_dim"),
        "value_head_dim": c.count("linear_value_head_dim"),
        "conv_width": c.count("linear_conv_kernel_dim", default=4),
        "state_bits": state_bits(c, "mamba_ssm_dtype"),
    }
    every = c.count("full_attention_interval", default=4)
    usual = ["full_attention" if (index + 1) % every == 0 else "linear_attention" for index in range(c.layers)]
    types = c.layer_list("layer_types") or usual
    ffns: list[Fields] = [{"kind": "gated", "intermediate": c.get("intermediate_size")}] * c.layers
    if c.get("num_experts"):
        shared = c.get("shared_expert_intermediate_size", default=0)
        experts = {
            "kind": "moe",
            "experts": c.count("num_experts"),
            "top_k": c.count("num_experts_per_tok"),
            "intermediate": c.count("moe_intermediate_size"),
            "shared_intermediate": shared,
            "shared_gate": bool(shared),
        }
        ffns = sparse_steps(c, experts)
    mixers = [attention if kind == "full_attention" else mixer for kind in types]
    return model(c, mixers, ffns, mtp_layers=c.get("mtp_num_hidden_layers", default=0))


def minimax_m1(c: Config) -> Fields:
    """MiniMax-Text-01 and M1: seven layers of lightning attention, then one of softmax attention."""
    types = c.layer_list("attn_type_list") or c.layer_list("layer_types") or []
    lightning = {"kind": "lightning", "heads": c.heads, "head_dim": c.head_dim}
    experts = {
        "kind": "moe",
        "experts": c.count("num_local_experts"),
        "top_k": c.count("num_experts_per_tok"),
        "intermediate": c.count("intermediate_size"),
        "shared_intermediate": max(c.get("shared_intermediate_size", default=[0]))
        if isinstance(c.get("shared_intermediate_size"), list)
        else c.get("shared_intermediate_size", default=0),
    }
    return model(c, [gqa(c) if kind in (1, "full_attention") else lightning for kind in types], experts)


FAMILIES: dict[str, Callable[[Config], Fields]] = {
    "MambaForCausalLM": mamba1,
    "FalconMambaForCausalLM": mamba1,
    "Mamba2ForCausalLM": mamba2,
    "MambaLMHeadModel": mamba2,
    "Rwkv6ForCausalLM": rwkv6,
    "RWKV6ForCausalLM": rwkv6,
    "Rwkv7ForCausalLM": rwkv7,
    "RWKV7ForCausalLM": rwkv7,
    "JambaForCausalLM": jamba,
    "NemotronHForCausalLM": nemotron_h,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3_5ForConditionalGeneration": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_next,
    "Qwen3_5MoeForConditionalGeneration": qwen3_next,
    "Qwen3_5MoeForCausalLM": qwen3_next,
    "MiniMaxM1ForCausalLM": minimax_m1,
    "MiniMaxText01ForCausalLM": minimax_m1,
    "MiniMaxForCausalLM": minimax_m1,
}
