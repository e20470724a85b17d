"""How do families with a gated network and RMS norms, Llama's descendants, describe themselves in config.json?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from membound.roofline.models.huggingface.facts import Config, Fields, gqa, model, windowed


def _gated(c: Config, **changes: Any) -> Fields:
    return {"kind": "gated", "intermediate": c.count("intermediate_size", "ffn_hidden_size"), **changes}


def llama(c: Config) -> Fields:
    """Llama, Mistral, Yi, Granite and others: biases where they say so, a window on all layers if there is one."""
    bias = c.flag("attention_bias", "bias")
    attention = gqa(c, qkv_bias=bias, o_bias=bias)
    return model(c, windowed(attention, c.windows(pattern=True)), _gated(c, bias=c.flag("mlp_bias")))


def mllama(c: Config) -> Fields:
    """Llama 3.2 Vision: without an image its cross-attention layers are passed over, so that they are idle."""
    crossing = c.get("cross_attention_layers", default=())
    attention, ffn = gqa(c), _gated(c)
    heads, kv_heads, dim = attention["heads"], attention["kv_heads"], attention["head_dim"]
    matrices = 2 * c.hidden * dim * (heads + kv_heads) + 3 * c.hidden * ffn["intermediate"]
    vectors = 2 * c.hidden + 2 * dim + 2  # norms, those of q and k, two gates
    return model(c, attention, ffn, layers=c.layers - len(crossing), idle_params=len(crossing) * (matrices + vectors))


def qwen1(c: Config) -> Fields:
    """Qwen 1: the config's intermediate size counts gate and up together."""
    attention = gqa(c, qkv_bias=True, head_dim=c.count("kv_channels", default=c.head_dim))
    ffn = {"kind": "gated", "intermediate": c.count("intermediate_size") // 2}
    return model(c, attention, ffn, max_context=c.count("seq_length", "max_position_embeddings"))


def qwen_windows(c: Config) -> list[int | None]:
    """Qwen's layers from `max_window_layers` on have the window, if `use_sliding_window`."""
    if not c.flag("use_sliding_window"):
        return [None] * c.layers
    first = c.get("max_window_layers", default=0)
    return c.windows([index >= first for index in range(c.layers)])


def qwen2(c: Config) -> Fields:
    """Qwen2, Qwen2.5, MiMo: biases of q, k and v."""
    return model(c, windowed(gqa(c, qkv_bias=True), qwen_windows(c)), _gated(c))


def qwen3(c: Config) -> Fields:
    """Qwen3: norms of q and k."""
    bias = c.flag("attention_bias")
    head_dim = c.count("head_dim", default=128)
    attention = gqa(c, qkv_bias=bias, o_bias=bias, qk_norm=True, head_dim=head_dim)
    return model(c, windowed(attention, qwen_windows(c)), _gated(c))


def gemma1(c: Config) -> Fields:
    return model(c, gqa(c, head_dim=c.count("head_dim", default=256)), _gated(c), **_gemma(c))


def gemma2(c: Config) -> Fields:
    """Every second layer has the window, beginning with the first; norms before and after each part."""
    windows = c.windows([index % 2 == 0 for index in range(c.layers)])
    return model(c, windowed(gqa(c), windows), _gated(c), norms_per_layer=4, **_gemma(c))


def gemma3(c: Config) -> Fields:
    """Every sixth layer sees everything; norms of q and k besides Gemma 2's."""
    every = c.count("sliding_window_pattern", "_sliding_window_pattern", default=6)
    windows = c.windows([(index + 1) % every != 0 for index in range(c.layers)])
    attention = gqa(c, qk_norm=True, head_dim=c.count("head_dim", default=256))
    return model(c, windowed(attention, windows), _gated(c), norms_per_layer=4, **_gemma(c))


def gemma3n(c: Config) -> Fields:
    """Gemma 3n: Gemma 3's layers with inputs of their own and several residual streams; the last ones share K and V.

    What checkpoints hold of the K and V matrices of layers that share them is idle.
    """
    attention = gqa(c, qk_norm=True, head_dim=c.count("head_dim", default=256))
    windows = c.windows([(index + 1) % 5 != 0 for index in range(c.layers)])
    attentions = sharing_kv(c, windowed(attention, windows))
    widths = c.get("intermediate_size")
    ffns: list[Fields] = [
        {"kind": "gated", "intermediate": width}
        for width in (widths if isinstance(widths, list) else [c.count("intermediate_size")] * c.layers)
    ]
    shared = c.get("num_kv_shared_layers", default=0)
    idle = shared * (2 * c.kv_heads * attention["head_dim"] * c.hidden + attention["head_dim"])
    streams = {"streams": c.count("altup_num_inputs", default=4), "laurel_rank": c.count("laurel_rank", default=64)}
    return model(
        c,
        attentions,
        ffns,
        norms_per_layer=4,
        per_layer_input=per_layer_input(c),
        streams=streams,
        idle_params=idle,
        **_gemma(c),
    )


def sharing_kv(c: Config, attentions: list[Fields]) -> list[Fields]:
    """The last `num_kv_shared_layers` layers read what earlier ones have cached."""
    first = c.layers - c.get("num_kv_shared_layers", default=0)
    return [one if index < first else one | {"shares_kv": True} for index, one in enumerate(attentions)]


def per_layer_input(c: Config) -> Fields | None:
    """The table of each layer's own inputs, if there is one."""
    if not c.get("hidden_size_per_layer_input", default=0):
        return None
    rows = c.count("vocab_size_per_layer_input", default=c.count("vocab_size"))
    return {"vocab": rows, "width": c.count("hidden_size_per_layer_input")}


def _gemma(c: Config) -> Fields:
    activation = c.get("hidden_activation", "hidden_act", default="gelu_pytorch_tanh")
    return {"tie_embeddings": c.get("tie_word_embeddings", default=True), "activation": activation}


def phi3(c: Config) -> Fields:
    """Phi-3, Phi-3.5, Phi-4: the window is on all layers."""
    return model(c, windowed(gqa(c), c.windows(pattern=True)), _gated(c))


def olmo(c: Config) -> Fields:
    """OLMo 1: layer norms without parameters."""
    return model(c, gqa(c), _gated(c), norm="unscaled")


def olmo2(c: Config) -> Fields:
    """OLMo 2 and 3: norms of all q and of all k, norms after attention and network instead of before."""
    attention = gqa(c, qk_norm=True, qk_norm_over="heads")
    windows = c.windows([(index + 1) % 4 != 0 for index in range(c.layers)]) if c.window else [None] * c.layers
    return model(c, windowed(attention, windows), _gated(c))


def cohere(c: Config) -> Fields:
    """Command R: attention and network side by side behind one layer norm without bias."""
    attention = gqa(c, qk_norm=c.flag("use_qk_norm"), qk_norm_over="heads")
    tied = c.get("tie_word_embeddings", default=True)
    every = c.count("sliding_window_pattern", default=4)
    windows = c.windows([c.architecture.startswith("Cohere2") and (i + 1) % every != 0 for i in range(c.layers)])
    return model(
        c, windowed(attention, windows), _gated(c), norm="layer_without_bias", norms_per_layer=1, tie_embeddings=tied
    )


def stablelm(c: Config) -> Fields:
    """StableLM: layer norms with bias, a part of each head rotated."""
    parallel = c.flag("use_parallel_residual")
    attention = gqa(c, qkv_bias=c.flag("use_qkv_bias"), qk_norm=c.flag("qk_layernorm"), qk_norm_over="heads")
    return model(c, attention, _gated(c), norm="layer", norms_per_layer=1 if parallel else 2)


def internlm2(c: Config) -> Fields:
    bias = c.flag("bias")
    return model(c, gqa(c, qkv_bias=bias, o_bias=bias), _gated(c))


def chatglm(c: Config) -> Fields:
    """ChatGLM2, ChatGLM3, GLM-4-9B: names of their own."""
    groups = c.count("multi_query_group_num") if c.flag("multi_query_attention") else c.heads
    attention = gqa(
        c,
        kv_heads=groups,
        head_dim=c.count("kv_channels", default=128),
        qkv_bias=c.flag("add_qkv_bias", "add_bias_linear"),
        o_bias=c.flag("add_bias_linear"),
    )
    return model(
        c,
        attention,
        _gated(c, intermediate=c.count("ffn_hidden_size"), bias=c.flag("add_bias_linear")),
        vocab=c.count("padded_vocab_size", "vocab_size"),
        norm="rms" if c.flag("rmsnorm", default=True) else "layer",
        rotary_fraction=0.5,
    )


def glm(c: Config) -> Fields:
    """GLM-4: biases of q, k and v; the 0414 releases have norms after attention and network too."""
    norms = 4 if c.architecture.startswith("Glm4") else 2
    return model(c, gqa(c, qkv_bias=c.flag("attention_bias")), _gated(c), norms_per_layer=norms)


def seed_oss(c: Config) -> Fields:
    attention = gqa(c, qkv_bias=c.flag("attention_bias"), o_bias=c.flag("attention_out_bias"))
    return model(c, attention, _gated(c, bias=c.flag("mlp_bias")))


def starcoder2(c: Config) -> Fields:
    """StarCoder2: two matrices with biases, layer norms."""
    bias = c.flag("use_bias", default=True)
    ffn = {"kind": "dense", "intermediate": c.count("intermediate_size"), "bias": bias}
    attention = gqa(c, qkv_bias=bias, o_bias=bias)
    tied = c.get("tie_word_embeddings", default=True)
    return model(c, windowed(attention, c.windows(pattern=True)), ffn, norm="layer", tie_embeddings=tied)


def nemotron(c: Config) -> Fields:
    """Nemotron-4 and Minitron: two matrices around a squared ReLU, layer norms."""
    bias = c.flag("attention_bias")
    ffn = {"kind": "dense", "intermediate": c.count("intermediate_size"), "bias": c.flag("mlp_bias")}
    return model(c, gqa(c, qkv_bias=bias, o_bias=bias), ffn, norm="layer")


def nemotron_nas(c: Config) -> Fields:
    """Llama-Nemotron: each layer has its own KV heads and width, or no attention, or no network."""
    attentions: list[Fields] = []
    ffns: list[Fields] = []
    for block in c.layer_list("block_configs") or []:
        for part in (block["attention"], block["ffn"]):
            if part.get("replace_with_linear"):
                raise c.unsupported("block_configs", "replace_with_linear must be false in every block")
        attentions.append(
            {"kind": "none"}
            if block["attention"]["no_op"]
            else gqa(c, kv_heads=c.heads // block["attention"]["n_heads_in_group"])
        )
        # the width is two thirds of the multiple of 4 hidden sizes in Llama, rounded up to 256
        width = block["ffn"]["ffn_mult"]
        width = None if width is None else -(-int(2 * width * c.hidden / 3) // 256) * 256
        ffns.append({"kind": "none"} if block["ffn"]["no_op"] else {"kind": "gated", "intermediate": width})
    return model(c, attentions, ffns)


FAMILIES: dict[str, Callable[[Config], Fields]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": llama,
    "Mistral3ForConditionalGeneration": llama,
    "LlavaForConditionalGeneration": llama,
    "MllamaForConditionalGeneration": mllama,
    "MllamaForCausalLM": mllama,
    "BitNetForCausalLM": llama,
    "BitnetForCausalLM": llama,
    "CwmForCausalLM": llama,
    "MiniCPMForCausalLM": llama,
    "Ministral3ForCausalLM": llama,
    "YiForCausalLM": llama,
    "InternLMForCausalLM": llama,
    "BaichuanForCausalLM": llama,
    "GraniteForCausalLM": llama,
    "AquilaForCausalLM": llama,
    "SmolLM3ForCausalLM": llama,
    "QWenLMHeadModel": qwen1,
    "Qwen2ForCausalLM": qwen2,
    "MiMoForCausalLM": qwen2,
    "Qwen2VLForConditionalGeneration": qwen2,
    "Qwen2_5_VLForConditionalGeneration": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3VLForConditionalGeneration": qwen3,
    "GemmaForCausalLM": gemma1,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3,
    "Phi3ForCausalLM": phi3,
    "Gemma3nForCausalLM": gemma3n,
    "Gemma3nForConditionalGeneration": gemma3n,
    "OlmoForCausalLM": olmo,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo2,
    "CohereForCausalLM": cohere,
    "Cohere2ForCausalLM": cohere,
    "StableLmForCausalLM": stablelm,
    "InternLM2ForCausalLM": internlm2,
    "InternLM3ForCausalLM": llama,
    "ChatGLMModel": chatglm,
    "ChatGLMForConditionalGeneration": chatglm,
    "GlmForCausalLM": glm,
    "Glm4ForCausalLM": glm,
    "SeedOssForCausalLM": seed_oss,
    "Starcoder2ForCausalLM": starcoder2,
    "NemotronForCausalLM": nemotron,
    "DeciLMForCausalLM": nemotron_nas,
}
