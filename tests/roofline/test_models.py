"""Is a model's shape what its sources say, and is what we do not support refused by name?"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from membound.roofline.models import LinearShape, ModelError, ModelSpec, catalog, get_model

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
GGUF_TINY = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 128,
    "llama.vocab_size": 32,
}


@pytest.mark.parametrize("name", catalog())
def test_parameters_are_within_half_a_percent_of_the_published_count(name: str) -> None:
    spec = get_model(name)
    assert spec.published_params_b is not None and spec.published_params_source
    assert spec.params / 1e9 == pytest.approx(spec.published_params_b, rel=0.005)


def test_parameters_are_counted_exactly() -> None:
    # counts that Hugging Face reports of the checkpoints; the last has q, k and v biases
    assert get_model("SmolLM2-135M").params == 134_515_008
    assert get_model("Llama-3.1-8B").params == 8_030_261_248
    assert get_model("Qwen2.5-7B").params == 7_615_616_512


def test_linears_are_fused_and_in_the_order_of_the_forward_pass() -> None:
    assert get_model("SmolLM2-135M").linear_shapes() == (
        LinearShape("qkv", (9 + 2 * 3) * 64, 576),
        LinearShape("o", 576, 9 * 64),
        LinearShape("gate_up", 2 * 1536, 576),
        LinearShape("down", 576, 1536),
        LinearShape("lm_head", 49152, 576),
    )


def test_heads_need_not_fill_the_hidden_size() -> None:
    qwen = get_model("Qwen3-32B")
    assert qwen.attention.heads * qwen.attention.head_dim == 8192 != qwen.hidden
    assert qwen.layer_linears()[1] == LinearShape("o", 5120, 8192)


def test_kv_bytes_follow_layers_kv_heads_and_bits() -> None:
    assert get_model("Llama-3.1-8B").kv_bytes_per_token(16) == 2 * 32 * 8 * 128 * 2
    assert get_model("Llama-3.1-8B").kv_bytes_per_token(4) == 32 * 8 * 128


def test_a_name_is_found_whatever_its_case_and_an_unknown_one_gets_close_matches() -> None:
    assert get_model("smollm2-135m") is get_model("SmolLM2-135M")
    with pytest.raises(ModelError, match=r"'Llama-3\.1-9B' is not in the catalog: did you mean .*Llama-3\.1-8B"):
        get_model("Llama-3.1-9B")
    with pytest.raises(ModelError, match=r"known are Llama-2-7B"):
        get_model("zzzz")


def test_a_hugging_face_config_gives_the_catalogs_shape() -> None:
    provenance = {"source", "name", "published_params_b", "published_params_source", "architecture"}
    spec = ModelSpec.from_hf_config(LLAMA_8B, "mine")
    assert spec.model_dump(exclude=provenance) == get_model("Llama-3.1-8B").model_dump(exclude=provenance)


def test_qwen_configs_bring_bias_or_norms_of_q_and_k() -> None:
    common = LLAMA_8B | {"rope_scaling": None, "sliding_window": 1024, "use_sliding_window": False}
    qwen2 = ModelSpec.from_hf_config(common | {"architectures": ["Qwen2ForCausalLM"]}, "q2").attention
    qwen3 = ModelSpec.from_hf_config(common | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 64}, "q3").attention
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, 128)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["BertForMaskedLM"]}, ["architectures", "BertForMaskedLM", "encodes"]),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, ["T5", "encoder"]),
        ({"architectures": ["CLIPModel"]}, ["CLIPModel", "no language model"]),
        ({"architectures": None, "_class_name": "UNet2DConditionModel"}, ["UNet2DConditionModel", "image"]),
        ({"architectures": None, "model_type": None}, ["architectures"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures", "list"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers", "-1"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "0", "positive"]),
        ({"num_key_value_heads": 7}, ["attention", "heads 32", "kv_heads 7"]),
        ({"rope_scaling": {"rope_type": "llama3"}}, ["rope_scaling", "factor", "missing"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "1", "each layer"]),
    ],
)
def test_what_is_no_language_model_or_makes_no_sense_is_refused_in_one_sentence(
    change: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ModelError) as refusal:
        ModelSpec.from_hf_config(LLAMA_8B | change, "mine")
    message = str(refusal.value)
    assert all(word in message for word in [*words, "mine"]), message
    assert message.endswith(".") and "\n" not in message


def test_gguf_metadata_gives_the_shape_with_defaults_for_what_it_omits() -> None:
    spec = ModelSpec.from_gguf_metadata(GGUF_TINY, "tiny", tie_embeddings=True)
    assert (spec.layers, spec.hidden, spec.vocab, spec.ffn.intermediate) == (2, 64, 32, 96)
    assert (spec.attention.head_dim, spec.rope_theta, spec.tie_embeddings) == (16, 10000.0, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": "clip"}, ["general.architecture", "clip", "qwen3"]),
        ({"general.architecture": None}, ["general.architecture", "missing"]),
        ({"llama.attention.head_count": [4, 8]}, ["llama.attention.head_count", "layer"]),
        ({"llama.block_count": None}, ["llama.block_count", "missing"]),
        ({"llama.embedding_length": "wide"}, ["llama.embedding_length", "wide"]),
    ],
)
def test_gguf_metadata_that_make_no_sense_are_refused(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as refusal:
        ModelSpec.from_gguf_metadata(GGUF_TINY | change, "tiny")
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_importing_models_loads_neither_torch_nor_gguf() -> None:
    code = "import sys, membound.roofline.models; print(sorted({'torch', 'gguf'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
