"""Do the metadata of a GGUF give the shape that its model has in the catalog?"""

from __future__ import annotations

from typing import Any

import pytest

from membound.roofline.models import ModelError, ModelSpec, get_model

TINY = {
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


def metadata(arch: str, **values: Any) -> dict[str, Any]:
    """Keys of the architecture; two underscores stand for the dot within a key."""
    fields = {f"{arch}.{key.replace('__', '.')}": value for key, value in values.items()}
    return {"general.architecture": arch, f"{arch}.context_length": 4096} | fields


def transformer(
    arch: str, layers: int, hidden: int, width: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> Any:
    return metadata(
        arch,
        block_count=layers,
        embedding_length=hidden,
        feed_forward_length=width,
        attention__head_count=heads,
        attention__head_count_kv=kv_heads,
        vocab_size=vocab,
        **more,
    )


FILES = {
    "Llama-2-7B": transformer("llama", 32, 4096, 11008, 32, 32, 32000),
    "Mixtral-8x7B": transformer("llama", 32, 4096, 14336, 32, 8, 32000, expert_count=8, expert_used_count=2),
    "Qwen2.5-7B": transformer("qwen2", 28, 3584, 18944, 28, 4, 152064),
    "Qwen3-8B": transformer("qwen3", 36, 4096, 12288, 32, 8, 151936, attention__key_length=128),
    "Qwen3-30B-A3B": transformer(
        "qwen3moe",
        *(48, 2048, 6144, 32, 4, 151936),
        attention__key_length=128,
        expert_count=128,
        expert_used_count=8,
        expert_feed_forward_length=768,
    ),
    "LFM2-1.2B": transformer(
        "lfm2",
        *(16, 2048, 8192, 32, [0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0], 65536),
        shortconv__l_cache=3,
    ),
    "LFM2-8B-A1B": transformer(
        "lfm2moe",
        *(24, 2048, 7168, 32, [8 if index in (2, 6, 10, 14, 18, 21) else 0 for index in range(24)], 65536),
        shortconv__l_cache=3,
        expert_count=32,
        expert_used_count=4,
        expert_feed_forward_length=1792,
        leading_dense_block_count=2,
    ),
    "Granite-4.0-H-Tiny": transformer(
        "granitehybrid",
        *(40, 1536, 512, 12, [4 if index % 10 == 5 else 0 for index in range(40)], 100352),
        expert_count=64,
        expert_used_count=6,
        expert_shared_feed_forward_length=1024,
        ssm__conv_kernel=4,
        ssm__state_size=128,
        ssm__group_count=1,
        ssm__inner_size=3072,
        ssm__time_step_rank=48,
    ),
    "Falcon-H1-7B": transformer(
        "falcon-h1",
        *(44, 3072, 12288, 12, 2, 130049),
        attention__key_length=128,
        ssm__conv_kernel=4,
        ssm__state_size=256,
        ssm__group_count=1,
        ssm__inner_size=3072,
        ssm__time_step_rank=24,
    ),
    "GLM-4-9B-0414": transformer("glm4", 40, 4096, 13696, 32, 2, 151552),
    "Hunyuan-7B": transformer("hunyuan-dense", 32, 4096, 14336, 32, 8, 128167, attention__key_length=128),
    "dots.llm1": transformer(
        "dots1",
        *(62, 4096, 10944, 32, 32, 152064),
        expert_count=128,
        expert_used_count=6,
        expert_feed_forward_length=1408,
        expert_shared_count=2,
        leading_dense_block_count=1,
    ),
    "Ling-lite": transformer(
        "bailingmoe",
        *(28, 2048, 5632, 16, 4, 126464),
        attention__key_length=128,
        expert_count=64,
        expert_used_count=6,
        expert_feed_forward_length=1408,
        expert_shared_count=2,
        leading_dense_block_count=0,
    ),
    "Qwen1.5-MoE-A2.7B": transformer(
        "qwen2moe",
        *(24, 2048, 5632, 16, 16, 151936),
        expert_count=60,
        expert_used_count=4,
        expert_feed_forward_length=1408,
        expert_shared_feed_forward_length=5632,
    ),
    "Gemma-2-9B": transformer(
        "gemma2", *(42, 3584, 14336, 16, 8, 256000), attention__key_length=256, attention__sliding_window=4096
    )
    | {"gemma2.context_length": 8192},
    "Gemma-3-1B": transformer(
        "gemma3", *(26, 1152, 6912, 4, 1, 262144), attention__key_length=256, attention__sliding_window=512
    ),
    "Phi-3.5-mini": transformer("phi3", 32, 3072, 8192, 32, 32, 32064),
    "Phi-2": transformer("phi2", 32, 2560, 10240, 32, 32, 51200, rope__dimension_count=32),
    "DeepSeek-V2-Lite": transformer(
        "deepseek2",
        *(27, 2048, 10944, 16, 16, 102400),
        attention__kv_lora_rank=512,
        attention__key_length=192,
        attention__value_length=128,
        rope__dimension_count=64,
        expert_count=64,
        expert_used_count=6,
        expert_shared_count=2,
        expert_feed_forward_length=1408,
        leading_dense_block_count=1,
    ),
    "gpt-oss-20b": transformer(
        "gpt-oss",
        *(24, 2880, 2880, 64, 8, 201088),
        attention__key_length=64,
        attention__sliding_window=128,
        expert_count=32,
        expert_used_count=4,
    ),
    "Falcon-7B": transformer("falcon", 32, 4544, 18176, 71, 1, 65024),
    "StarCoder2-7B": transformer("starcoder2", *(32, 4608, 18432, 36, 4, 49152), attention__sliding_window=4096)
    | {"starcoder2.context_length": 16384},
    "GPT-NeoX-20B": transformer("gptneox", 44, 6144, 24576, 64, 64, 50432, rope__dimension_count=24),
    "Mamba-2-2.7B": metadata(
        "mamba2",
        block_count=64,
        embedding_length=2560,
        vocab_size=50288,
        ssm__conv_kernel=4,
        ssm__inner_size=5120,
        ssm__state_size=128,
        ssm__time_step_rank=80,
        ssm__group_count=1,
    ),
    "RWKV-7-2.9B": metadata(
        "rwkv7",
        block_count=32,
        embedding_length=2560,
        feed_forward_length=10240,
        vocab_size=65536,
        wkv__head_size=64,
        attention__decay_lora_rank=96,
        attention__iclr_lora_rank=96,
        attention__value_residual_mix_lora_rank=64,
        attention__gate_lora_rank=320,
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_metadata_give_the_catalogs_layers_and_parameters(name: str) -> None:
    known = get_model(name)
    spec = ModelSpec.from_gguf_metadata(FILES[name], "file", tie_embeddings=known.tie_embeddings)
    assert spec.params == known.params
    assert spec.stack == known.stack


def test_metadata_give_the_shape_with_defaults_for_what_they_omit() -> None:
    spec = ModelSpec.from_gguf_metadata(TINY, "tiny", tie_embeddings=True)
    assert (spec.layers, spec.hidden, spec.vocab, spec.ffn.intermediate) == (2, 64, 32, 96)
    assert (spec.attention.head_dim, spec.rope_theta, spec.tie_embeddings) == (16, 10000.0, True)
    tokens = {"llama.vocab_size": None, "tokenizer.ggml.tokens": ["a", "b"]}
    assert ModelSpec.from_gguf_metadata(TINY | tokens, "tiny").vocab == 2


def test_a_list_that_is_the_same_for_all_layers_is_one_number() -> None:
    same = ModelSpec.from_gguf_metadata(TINY | {"llama.attention.head_count_kv": [2, 2]}, "tiny")
    assert same.groups() == ModelSpec.from_gguf_metadata(TINY, "tiny").groups()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": "clip"}, ["general.architecture", "clip", "qwen3"]),
        ({"general.architecture": None}, ["general.architecture", "missing"]),
        ({"llama.attention.head_count": [4, 8]}, ["llama.attention.head_count", "layer"]),
        ({"llama.block_count": None}, ["llama.block_count", "missing"]),
        ({"llama.embedding_length": "wide"}, ["llama.embedding_length", "wide"]),
        ({"llama.vocab_size": None}, ["llama.vocab_size", "missing"]),
        ({"llama.expert_count": 8}, ["llama.expert_used_count", "missing"]),
        ({"general.architecture": "mamba2"}, ["mamba2.ssm.inner_size"]),
    ],
)
def test_metadata_that_make_no_sense_are_refused_in_one_sentence(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as refusal:
        ModelSpec.from_gguf_metadata(TINY | change, "tiny")
    message = str(refusal.value)
    assert all(word in message for word in [*words, "tiny"]), message
    assert message.endswith(".") and "\n" not in message
