"""Where does the config.json of a model that sees or hears describe the model of its text?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Names that families give to the part of a config that is about text; some hold the next one.
_PARTS = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config")

# What a nested config leaves out because it is the default of its class: LLaVA-1.5, Gemma 3 (transformers 5.24.0:
# LlamaConfig, MistralConfig, Gemma3TextConfig).
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
}
# MiniCPM-V has one architecture over several language models, which its version tells (model cards, from memory).
_MINICPM_V = {2.6: "Qwen2ForCausalLM", 4.0: "LlamaForCausalLM", 4.5: "Qwen3ForCausalLM", 2.5: "LlamaForCausalLM"}


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The innermost part about text of a nested config; None for one that is flat."""
    for key in _PARTS:
        part = config.get(key)
        if isinstance(part, Mapping) and part:
            return text_part(part) or part
    return None


def vision_part(config: Mapping[str, Any]) -> Any:
    """The config of the encoder of images, where a nested config has one."""
    beside = config.get("thinker_config", config)
    return beside.get("vision_config") if isinstance(beside, Mapping) else None


def text_defaults(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """What such a part leaves out, by its `model_type`."""
    given = _DEFAULTS.get(str(text.get("model_type", "")), {})
    if "num_attention_heads" in text:  # heads of their own, and so no default of K, V and their size
        given = {key: value for key, value in given.items() if key != "num_key_value_heads"}
    return given


def flat_text_architecture(config: Mapping[str, Any], architecture: str) -> str | None:
    """Whose decoder a config of one level describes that does not name it; None where it does."""
    if architecture not in ("MiniCPMV", "MiniCPMO"):
        return None
    version = config.get("version", 2.6)
    return _MINICPM_V.get(float(version)) if isinstance(version, int | float | str) else None


def encoder_params(vision: Any) -> int:
    """About how many parameters an encoder of images has, whose config this is; 0 where that does not tell.

    A transformer's matrices, patches and positions; norms, projectors and what single families add make some percent.
    """
    if not isinstance(vision, Mapping):
        return 0

    def given(*keys: str) -> float:
        found = next((vision[key] for key in keys if isinstance(vision.get(key), int | float)), 0)
        return float(found) if found > 0 else 0.0

    width = given("embed_dim", "hidden_size", "width")
    layers = given("num_hidden_layers", "depth", "layers") + given("num_global_layers")
    inner = given("intermediate_size") or given("mlp_ratio") * width
    patch = given("patch_size")
    if not (width and layers and inner):
        return 0
    gated = 3 if vision.get("hidden_act") == "silu" else 2
    side = given("image_size") / patch if patch else 0.0
    tables = (3 * patch**2 * max(given("temporal_patch_size"), 1.0) + side**2) * width
    return round(layers * (4 * width**2 + gated * width * inner) + tables)
