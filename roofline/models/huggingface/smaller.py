"""How do further dense families, most of them small, describe themselves in config.json?"""

from __future__ import annotations

from collections.abc import Callable

from membound.roofline.models.huggingface.facts import Config, Fields, gqa, model, windowed
from membound.roofline.models.huggingface.mixture import latent


def _gated(c: Config) -> Fields:
    return {"kind": "gated", "intermediate": c.count("intermediate_size")}


def _dense(c: Config) -> Fields:
    return {"kind": "dense", "intermediate": c.count("intermediate_size"), "bias": c.flag("mlp_bias")}


def exaone(c: Config) -> Fields:
    """EXAONE 3: Llama's layers in names of GPT-2."""
    return model(c, gqa(c), _gated(c))


def exaone4(c: Config) -> Fields:
    """EXAONE 4: norms of q and k, norms after attention and network; in the large one three of four layers a window."""
    windows = c.windows([(index + 1) % 4 != 0 for index in range(c.layers)])
    return model(c, windowed(gqa(c, qk_norm=True), windows), _gated(c))


def hunyuan(c: Config) -> Fields:
    """Hunyuan dense: norms of q and k."""
    return model(c, gqa(c, qk_norm=c.flag("use_qk_norm", default=True)), _gated(c))


def arcee(c: Config) -> Fields:
    """AFM: two matrices around a squared ReLU."""
    bias = c.flag("attention_bias")
    return model(c, gqa(c, qkv_bias=bias, o_bias=bias), _dense(c))


def apertus(c: Config) -> Fields:
    """Apertus: norms of q and k, two matrices around xIELU."""
    bias = c.flag("attention_bias")
    return model(c, gqa(c, qkv_bias=bias, o_bias=bias, qk_norm=True), _dense(c))


def ernie(c: Config) -> Fields:
    bias = c.flag("use_bias")
    return model(c, gqa(c, qkv_bias=bias, o_bias=bias), _gated(c))


def dense_latent(c: Config) -> Fields:
    """Youtu and MiniCPM 3: latent attention beside one network."""
    return model(c, latent(c), _gated(c))


FAMILIES: dict[str, Callable[[Config], Fields]] = {
    "ExaoneForCausalLM": exaone,
    "Exaone4ForCausalLM": exaone4,
    "HunYuanDenseV1ForCausalLM": hunyuan,
    "ArceeForCausalLM": arcee,
    "ApertusForCausalLM": apertus,
    "Ernie4_5ForCausalLM": ernie,
    "YoutuForCausalLM": dense_latent,
    "YoutuLLMForCausalLM": dense_latent,
    "MiniCPM3ForCausalLM": dense_latent,
}
