"""Which model does a Hugging Face config.json describe?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from membound.roofline.models.base import ModelError
from membound.roofline.models.huggingface import classic, dense, hybrid, mixed, mixture, shared_experts, smaller
from membound.roofline.models.huggingface.facts import Config
from membound.roofline.models.huggingface.multimodal import (
    encoder_params,
    flat_text_architecture,
    text_defaults,
    text_part,
    vision_part,
)
from membound.roofline.models.huggingface.quantization import read_quantization
from membound.roofline.models.spec import ModelSpec, build

FAMILIES = {
    architecture: reader
    for family in (dense, smaller, classic, mixture, shared_experts, hybrid, mixed)
    for architecture, reader in family.FAMILIES.items()
}

# `model_type` where it is not the architecture in lower case, for a config that names no architecture
_MODEL_TYPES = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_oss": "GptOssForCausalLM",
    "refinedweb": "FalconForCausalLM",
    "refinedwebmodel": "FalconForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "qwen": "QWenLMHeadModel",
    "chatglm": "ChatGLMModel",
    "nemotron-nas": "DeciLMForCausalLM",
    # what the text part of a nested config calls itself
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_omni": "Qwen2ForCausalLM",
    "qwen3_vl": "Qwen3ForCausalLM",
    "qwen3_vl_moe": "Qwen3MoeForCausalLM",
    "qwen3_omni_moe": "Qwen3MoeForCausalLM",
    "glm4v": "Glm4ForCausalLM",
    "glm4v_moe": "Glm4MoeForCausalLM",
    "mllama": "MllamaForConditionalGeneration",
    "mllama_text_model": "MllamaForConditionalGeneration",
}


def read_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """The model of a config.json; one that sees or hears is read from the part that describes its text.

    Raises ModelError with one sentence for another architecture, a missing fact, or one that makes no sense, and for
    a quantization that is not known.
    """
    architecture = _architecture(config, name)
    vision = vision_part(config)
    if text := text_part(config):
        kept = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
        config = {**kept, **text_defaults(text), **text}
    source = f"Hugging Face config.json of {name}"
    spec = read_family(Config(config, name, architecture), source)
    if idle := encoder_params(vision):
        spec = spec.model_copy(update={"idle_params": spec.idle_params + idle})
    checkpoint = read_quantization(config, spec, f"quantization_config of the {source}")
    return spec if checkpoint is None else spec.model_copy(update={"checkpoint": checkpoint})


def read_family(c: Config, source: str) -> ModelSpec:
    """The model that the reader of the config's architecture makes of it."""
    try:
        fields = FAMILIES[c.architecture](c)
    except ModelError:
        raise
    except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as error:
        raise ModelError(f"{source} ({c.architecture}) holds a value of a wrong type: {error}.") from None
    return build(name=c.name, source=source, **fields)


def _architecture(config: Mapping[str, Any], name: str) -> str:
    listed = config.get("architectures")
    if listed is not None and not isinstance(listed, list):
        raise ModelError(f"architectures of {name} is {listed!r:.80}, which must be a list of names.")
    if text := text_part(config):
        try:
            return _architecture(text, name)
        except ModelError:
            pass  # the whole config says what it is, or is to blame
    model_type = str(config.get("model_type", ""))
    architecture = str(listed[0]) if listed else _by_model_type(model_type)
    if (flat := flat_text_architecture(config, architecture)) is not None:
        return flat
    if architecture in FAMILIES:
        return architecture
    what = architecture or model_type or None
    kind = _what_else(config, f"{architecture} {model_type}")
    raise ModelError(
        f"architectures of {name} is {what}, {kind}: it must be a decoder-only language model of a known family; "
        f"if it is built as one, name that, such as LlamaForCausalLM, Qwen3MoeForCausalLM or DeepseekV3ForCausalLM."
    )


def _by_model_type(model_type: str) -> str:
    model_type = model_type.lower().removesuffix("_text")
    if model_type in _MODEL_TYPES:
        return _MODEL_TYPES[model_type]
    by_lower = {known.removesuffix("ForCausalLM").lower(): known for known in FAMILIES if known.endswith("ForCausalLM")}
    return by_lower.get(model_type.replace("_", ""), "")


def _what_else(config: Mapping[str, Any], words: str) -> str:
    if "_class_name" in config:
        return f"a part of an image generator ({config['_class_name']})"
    if config.get("is_encoder_decoder"):
        return "which has an encoder beside its decoder"
    if any(word in words for word in ("Bert", "bert", "MaskedLM", "Encoder", "SequenceClassification")):
        return "which encodes text and writes none"
    if any(word in words.lower() for word in ("clip", "vit", "vision", "whisper", "wav2vec", "diffusion")):
        return "which is no language model"
    return "which is not supported"
