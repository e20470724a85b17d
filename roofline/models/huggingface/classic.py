"""How do families with two-matrix networks and layer norms, GPT's descendants, describe themselves in config.json?"""

from __future__ import annotations

from collections.abc import Callable

from membound.roofline.models.huggingface.facts import Config, Fields, gqa, model

_UNROTATED = {"rotary_fraction": 1.0, "rope_scaling": None}


def _dense(c: Config, *keys: str, bias: bool = True, times: int = 4) -> Fields:
    """Two matrices, by default four times as wide as the hidden state."""
    return {"kind": "dense", "intermediate": c.count(*keys, default=times * c.hidden), "bias": bias}


def gpt2(c: Config) -> Fields:
    """GPT-2, and StarCoder 1 with a single KV head: a learned table of positions, biases everywhere."""
    attention = gqa(c, kv_heads=1 if c.flag("multi_query") else c.heads, qkv_bias=True, o_bias=True)
    tied = c.get("tie_word_embeddings", default=True)
    return model(
        c, attention, _dense(c, "n_inner"), norm="layer", tie_embeddings=tied, position_rows=c.max_context, **_UNROTATED
    )


def gpt_j(c: Config) -> Fields:
    """GPT-J: attention and network side by side behind one norm; an lm_head with bias."""
    attention = gqa(c)
    return model(
        c, attention, _dense(c, "n_inner"), norm="layer", norms_per_layer=1, lm_head_bias=True, **_rotary_dim(c)
    )


def _rotary_dim(c: Config) -> Fields:
    return {"rotary_fraction": c.count("rotary_dim", default=c.head_dim) / c.head_dim, "rope_scaling": None}


def gpt_neox(c: Config) -> Fields:
    """GPT-NeoX, Pythia: a norm for each of attention and network, whether or not they run side by side."""
    bias = c.flag("attention_bias", default=True)
    return model(c, gqa(c, qkv_bias=bias, o_bias=bias), _dense(c, "intermediate_size"), norm="layer")


def opt(c: Config) -> Fields:
    """OPT: a learned table with two rows before the first position."""
    if c.get("word_embed_proj_dim", default=c.hidden) != c.hidden:
        raise c.unsupported("word_embed_proj_dim", "it must equal hidden_size")
    bias = c.flag("enable_bias", default=True)
    attention = gqa(c, qkv_bias=bias, o_bias=bias)
    tied = c.get("tie_word_embeddings", default=True)
    rows = c.max_context + 2
    ffn = _dense(c, "ffn_dim", bias=bias)
    return model(c, attention, ffn, norm="layer", tie_embeddings=tied, position_rows=rows, **_UNROTATED)


def bloom(c: Config) -> Fields:
    """BLOOM: positions only in attention's scores (ALiBi), a norm after the embedding."""
    attention = gqa(c, qkv_bias=True, o_bias=True)
    context = c.count("seq_length", "max_position_embeddings", default=2048)
    return model(
        c,
        attention,
        _dense(c),
        norm="layer",
        tie_embeddings=True,
        embedding_norm=True,
        max_context=context,
        **_UNROTATED,
    )


def falcon(c: Config) -> Fields:
    """Falcon: one KV head, or several in the newer form, which has a norm for each of attention and network."""
    newer, parallel = c.flag("new_decoder_architecture"), c.flag("parallel_attn", default=True)
    many = c.heads if not c.flag("multi_query", default=True) else 1
    bias = c.flag("bias")
    attention = gqa(c, kv_heads=c.kv_heads if newer else many, qkv_bias=bias, o_bias=bias)
    norms = 1 if parallel and (not newer or c.get("num_ln_in_parallel_attn") == 1) else 2
    ffn = _dense(c, "ffn_hidden_size", bias=bias)
    context = c.count("max_position_embeddings", default=2048)
    tied = c.get("tie_word_embeddings", default=True)
    return model(c, attention, ffn, norm="layer", norms_per_layer=norms, tie_embeddings=tied, max_context=context)


def mpt(c: Config) -> Fields:
    """MPT: no biases, not even in the norms."""
    inner = c.get("attn_config", default={})
    kv_heads = inner.get("kv_n_heads") or (1 if inner.get("attn_type") == "multiquery_attention" else c.heads)
    bias = not c.flag("no_bias", default=True)
    attention = gqa(c, kv_heads=kv_heads, qkv_bias=bias, o_bias=bias)
    ffn = _dense(c, bias=bias, times=int(c.get("expansion_ratio", default=4)))
    rows = 0 if inner.get("alibi") or inner.get("rope") else c.max_context
    norm = "layer" if bias else "layer_without_bias"
    return model(c, attention, ffn, norm=norm, tie_embeddings=True, position_rows=rows, **_UNROTATED)


def phi(c: Config) -> Fields:
    """Phi-1 and Phi-2: attention and network side by side behind one norm, biases everywhere."""
    attention = gqa(c, qkv_bias=True, o_bias=True)
    return model(c, attention, _dense(c, "intermediate_size"), norm="layer", norms_per_layer=1, lm_head_bias=True)


FAMILIES: dict[str, Callable[[Config], Fields]] = {
    "GPT2LMHeadModel": gpt2,
    "GPTBigCodeForCausalLM": gpt2,
    "GPTJForCausalLM": gpt_j,
    "GPTNeoXForCausalLM": gpt_neox,
    "OPTForCausalLM": opt,
    "BloomForCausalLM": bloom,
    "FalconForCausalLM": falcon,
    "RWForCausalLM": falcon,
    "MPTForCausalLM": mpt,
    "MptForCausalLM": mpt,
    "PhiForCausalLM": phi,
}
