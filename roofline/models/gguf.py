"""Which model do a GGUF's metadata describe?

They say what a config.json says in other words, so they are translated and read by the same families.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from membound.roofline.models.base import ModelError
from membound.roofline.models.huggingface import read_family
from membound.roofline.models.huggingface.facts import Config
from membound.roofline.models.spec import ModelSpec

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi2": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",
    "falcon": "FalconForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gptneox": "GPTNeoXForCausalLM",
    "bloom": "BloomForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "command-r": "CohereForCausalLM",
    "granite": "GraniteForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
    "arcee": "ArceeForCausalLM",
    "apertus": "ApertusForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "bailingmoe": "BailingMoeForCausalLM",
    "bailingmoe2": "BailingMoeV2ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    "falcon-h1": "FalconH1ForCausalLM",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "rwkv6": "Rwkv6ForCausalLM",
    "rwkv7": "Rwkv7ForCausalLM",
}

# what layers of a hybrid are that have no KV heads
_HYBRIDS = {"lfm2": "conv", "lfm2moe": "conv", "granitehybrid": "mamba"}

# what config.json calls what a GGUF calls `<architecture>.<key>`
_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "state_size",
    "ssm.group_count": "n_groups",
    "wkv.head_size": "head_size",
    "attention.decay_lora_rank": "decay_low_rank_dim",
    "attention.iclr_lora_rank": "a_low_rank_dim",
    "attention.value_residual_mix_lora_rank": "v_low_rank_dim",
    "attention.gate_lora_rank": "gate_low_rank_dim",
}


def read_metadata(fields: Mapping[str, Any], name: str, *, tie_embeddings: bool) -> ModelSpec:
    """The model of a GGUF's metadata; raises ModelError with one sentence where that is not possible."""
    arch = fields.get("general.architecture")
    if arch is None:
        raise ModelError(f"general.architecture of {name} is missing, and there is no default for it.")
    if arch not in _ARCHITECTURES:
        raise ModelError(
            f"general.architecture of {name} is {arch!r}, which is not supported: "
            f"a GGUF must be one of {', '.join(_ARCHITECTURES)}."
        )
    kinds = _kinds_of_layers(fields, str(arch))
    config = {
        key: max(fields[f"{arch}.{gguf_key}"])
        if kinds and key == "num_key_value_heads"
        else _one(fields, f"{arch}.{gguf_key}", name)
        for gguf_key, key in _KEYS.items()
    }
    config["layer_types"] = kinds
    config["tie_word_embeddings"] = tie_embeddings
    if config["vocab_size"] is None:
        config["vocab_size"] = len(fields.get("tokenizer.ggml.tokens") or ()) or None
    architecture = _ARCHITECTURES[arch]
    if arch == "llama" and config["num_experts"]:
        architecture = "MixtralForCausalLM"
    spoken = {key: f"{arch}.{gguf_key}" for gguf_key, key in _KEYS.items()}
    c = Config(config, name, architecture, spoken)
    config |= _rope(c, fields, str(arch)) | _own_words(c, fields, str(arch))
    return read_family(c, f"GGUF metadata of {name}")


def _kinds_of_layers(fields: Mapping[str, Any], arch: str) -> list[str] | None:
    """Which layers of a hybrid attend: those that have KV heads."""
    kv_heads = fields.get(f"{arch}.attention.head_count_kv")
    if arch not in _HYBRIDS or not isinstance(kv_heads, list | tuple):
        return None
    return ["full_attention" if heads else _HYBRIDS[arch] for heads in kv_heads]


def _one(fields: Mapping[str, Any], key: str, name: str) -> Any:
    """A value that is one for all layers; raises ModelError where it differs by layer."""
    value = fields.get(key)
    if not isinstance(value, list | tuple):
        return value
    if len(set(value)) != 1:
        raise ModelError(f"{key} of {name} differs by layer, which is not supported: it must be one number.")
    return value[0]


def _rope(c: Config, fields: Mapping[str, Any], arch: str) -> dict[str, Any]:
    kind = fields.get(f"{arch}.rope.scaling.type", "none")
    rotated = fields.get(f"{arch}.rope.dimension_count")
    scaling = {} if kind == "none" else {"rope_scaling": {"rope_type": kind}}
    if rotated is None or c.get("kv_lora_rank") is not None or c.get("num_attention_heads") is None:
        return scaling
    return scaling | {"partial_rotary_factor": rotated / c.head_dim, "rotary_dim": rotated}


def _own_words(c: Config, fields: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """Facts of single architectures that GGUF cuts otherwise than config.json."""
    if arch == "deepseek2":
        rotated = fields.get(f"{arch}.rope.dimension_count", 64)
        mla = "_mla" if f"{arch}.attention.key_length_mla" in fields else ""
        key_length = fields.get(f"{arch}.attention.key_length{mla}", 192)
        return {
            "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": key_length - rotated,
            "v_head_dim": fields.get(f"{arch}.attention.value_length{mla}", 128),
            "topk_method": "noaux_tc" if fields.get(f"{arch}.expert_gating_func") == 2 else None,
        }
    if arch == "falcon":
        newer = c.kv_heads > 1
        return {"new_decoder_architecture": newer, "multi_query": True, "parallel_attn": True}
    if arch == "llama4":
        return {
            "intermediate_size": c.get("moe_intermediate_size"),
            "intermediate_size_mlp": c.get("intermediate_size"),
        }
    if arch in ("lfm2", "lfm2moe"):
        # the length of the network is that of its matrices
        dense = {"num_experts": None} if not c.get("num_experts") else {}
        kept = {"conv_L_cache": fields.get(f"{arch}.shortconv.l_cache"), "block_auto_adjust_ff_dim": False}
        return dense | kept | {"num_dense_layers": c.get("first_k_dense_replace", default=0)}
    if arch in ("granitehybrid", "falcon-h1"):
        inner, heads = fields.get(f"{arch}.ssm.inner_size"), fields.get(f"{arch}.ssm.time_step_rank")
        shared = c.get("shared_expert_intermediate_size", "intermediate_size")
        ssm = {"mamba_d_ssm": inner, "mamba_n_heads": heads, "mamba_d_state": c.get("state_size")}
        return ssm | {"num_local_experts": c.get("num_experts"), "shared_intermediate_size": shared}
    if arch == "bailingmoe2":
        return {"use_qk_norm": True, "moe_router_enable_expert_bias": True}
    if arch in ("mamba", "mamba2"):
        inner, rank = fields.get(f"{arch}.ssm.inner_size"), fields.get(f"{arch}.ssm.time_step_rank")
        if arch == "mamba":
            return {"intermediate_size": inner, "time_step_rank": rank, "head_dim": None}
        if not inner or not rank:
            raise ModelError(f"{arch}.ssm.inner_size or ssm.time_step_rank of {c.name} is missing: both are needed.")
        return {"num_heads": rank, "head_dim": inner // rank}
    if arch == "starcoder2":
        return {"hidden_act": "gelu_pytorch_tanh"}  # a GGUF does not say; Hugging Face `Starcoder2Config`
    if arch == "gpt2":
        return {"n_inner": c.get("intermediate_size")}
    return {}
