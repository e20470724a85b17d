"""Does a config.json of each family give the catalog's shape, and is what is no language model refused?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from config_json import config

from membound.roofline.models import ModelError, ModelSpec, OtherRopeScaling, get_model
from membound.roofline.models.files import resolve_model

LLAMA_8B: dict[str, Any] = {
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


MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1}
CONFIGS = {
    "Llama-3.1-8B": LLAMA_8B,
    "Mistral-7B-v0.1": config(
        "MistralForCausalLM",
        *(32, 4096, 32, 8, 32000),
        intermediate_size=14336,
        sliding_window=4096,
        max_position_embeddings=32768,
    ),
    "Qwen-72B": {
        "architectures": ["QWenLMHeadModel"],
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 49152,
        "num_attention_heads": 64,
        "kv_channels": 128,
        "vocab_size": 152064,
        "seq_length": 32768,
    },
    "Qwen2.5-7B": config(
        "Qwen2ForCausalLM",
        *(28, 3584, 28, 4, 152064),
        intermediate_size=18944,
        sliding_window=1024,
        use_sliding_window=False,
    ),
    "Qwen3-8B": config("Qwen3ForCausalLM", *(36, 4096, 32, 8, 151936), intermediate_size=12288, head_dim=128),
    "Qwen3-30B-A3B": config(
        "Qwen3MoeForCausalLM",
        *(48, 2048, 32, 4, 151936),
        head_dim=128,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "Qwen1.5-MoE-A2.7B": config(
        "Qwen2MoeForCausalLM",
        *(24, 2048, 16, 16, 151936),
        intermediate_size=5632,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        num_experts=60,
        num_experts_per_tok=4,
    ),
    "Qwen3-Next-80B-A3B": config(
        "Qwen3NextForCausalLM",
        *(48, 2048, 16, 2, 151936),
        head_dim=256,
        intermediate_size=5120,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts=512,
        num_experts_per_tok=10,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
    "Mixtral-8x7B": config(
        "MixtralForCausalLM",
        *(32, 4096, 32, 8, 32000),
        intermediate_size=14336,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "gpt-oss-20b": config(
        "GptOssForCausalLM",
        *(24, 2880, 64, 8, 201088),
        head_dim=64,
        intermediate_size=2880,
        num_local_experts=32,
        num_experts_per_tok=4,
        attention_bias=True,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 12,
    ),
    "DeepSeek-V3": config(
        "DeepseekV3ForCausalLM",
        *(61, 7168, 128, 128, 129280),
        **MLA,
        q_lora_rank=1536,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        topk_method="noaux_tc",
        n_group=8,
        topk_group=4,
        num_nextn_predict_layers=1,
    ),
    "DeepSeek-V2-Lite": config(
        "DeepseekV2ForCausalLM",
        *(27, 2048, 16, 16, 102400),
        **MLA,
        q_lora_rank=None,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
    ),
    "GLM-4.5-Air": config(
        "Glm4MoeForCausalLM",
        *(46, 4096, 96, 8, 151552),
        head_dim=128,
        attention_bias=True,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=1,
    ),
    "Llama-4-Maverick-17B-128E": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": config(
            "Llama4ForCausalLM",
            *(48, 5120, 40, 8, 202048),
            head_dim=128,
            intermediate_size=8192,
            intermediate_size_mlp=16384,
            num_local_experts=128,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            attention_chunk_size=8192,
            max_position_embeddings=1048576,
        ),
    },
    "Gemma-2-9B": config(
        "Gemma2ForCausalLM",
        *(42, 3584, 16, 8, 256000),
        head_dim=256,
        intermediate_size=14336,
        sliding_window=4096,
        max_position_embeddings=8192,
    ),
    "Gemma-3-27B": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "tie_word_embeddings": True,
        "text_config": config(
            "",
            *(62, 5376, 32, 16, 262208),
            head_dim=128,
            intermediate_size=21504,
            sliding_window=1024,
            max_position_embeddings=131072,
        ),
    },
    "Phi-3-mini-4k": config("Phi3ForCausalLM", *(32, 3072, 32, 32, 32064), intermediate_size=8192, sliding_window=2047),
    "Phi-2": config("PhiForCausalLM", *(32, 2560, 32, 32, 51200), intermediate_size=10240),
    "GPT-2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "GPT-J-6B": {
        "architectures": ["GPTJForCausalLM"],
        "n_layer": 28,
        "n_embd": 4096,
        "n_head": 16,
        "n_positions": 2048,
        "rotary_dim": 64,
        "vocab_size": 50400,
        "tie_word_embeddings": False,
    },
    "GPT-NeoX-20B": config("GPTNeoXForCausalLM", *(44, 6144, 64, 64, 50432), intermediate_size=24576, rotary_pct=0.25),
    "OPT-6.7B": {
        "architectures": ["OPTForCausalLM"],
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "ffn_dim": 16384,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 4096,
    },
    "BLOOM-7B1": {
        "architectures": ["BloomForCausalLM"],
        "n_layer": 30,
        "hidden_size": 4096,
        "n_head": 32,
        "vocab_size": 250880,
    },
    "Falcon-7B": config("FalconForCausalLM", *(32, 4544, 71, 71, 65024), multi_query=True, parallel_attn=True),
    "Falcon-40B": {
        "architectures": ["RWForCausalLM"],
        "num_hidden_layers": 60,
        "hidden_size": 8192,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
        "vocab_size": 65024,
    },
    "MPT-7B": {
        "architectures": ["MPTForCausalLM"],
        "n_layers": 32,
        "d_model": 4096,
        "n_heads": 32,
        "vocab_size": 50432,
        "max_seq_len": 2048,
        "no_bias": True,
        "attn_config": {"alibi": True},
    },
    "StarCoder-15.5B": {
        "architectures": ["GPTBigCodeForCausalLM"],
        "multi_query": True,
        "n_layer": 40,
        "n_embd": 6144,
        "n_head": 48,
        "n_inner": 24576,
        "n_positions": 8192,
        "vocab_size": 49152,
    },
    "StarCoder2-7B": config(
        "Starcoder2ForCausalLM",
        *(32, 4608, 36, 4, 49152),
        intermediate_size=18432,
        use_bias=True,
        sliding_window=4096,
        max_position_embeddings=16384,
    ),
    "Command-R-35B": config("CohereForCausalLM", *(40, 8192, 64, 64, 256000), intermediate_size=22528),
    "DBRX": {
        "architectures": ["DbrxForCausalLM"],
        "n_layers": 40,
        "d_model": 6144,
        "n_heads": 48,
        "vocab_size": 100352,
        "max_seq_len": 32768,
        "attn_config": {"kv_n_heads": 8},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    },
    "ChatGLM3-6B": {
        "architectures": ["ChatGLMModel"],
        "num_layers": 28,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "kv_channels": 128,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "ffn_hidden_size": 13696,
        "add_qkv_bias": True,
        "padded_vocab_size": 65024,
        "seq_length": 8192,
    },
    "InternLM-7B": config("InternLMForCausalLM", *(32, 4096, 32, 32, 103168), intermediate_size=11008, bias=True),
    "OLMo-2-7B": config("Olmo2ForCausalLM", *(32, 4096, 32, 32, 100352), intermediate_size=11008),
    "StableLM-2-1.6B": config(
        "StableLmForCausalLM", *(24, 2048, 32, 32, 100352), intermediate_size=5632, use_qkv_bias=True
    ),
    "Mamba-2-2.7B": {
        "architectures": ["MambaLMHeadModel"],
        "d_model": 2560,
        "n_layer": 64,
        "vocab_size": 50277,
        "pad_vocab_size_multiple": 16,
        "ssm_cfg": {"layer": "Mamba2"},
    },
    "RWKV-6-7B": {
        "architectures": ["Rwkv6ForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "vocab_size": 65536,
        "head_size": 64,
    },
    "RWKV-7-2.9B": {
        "architectures": ["RWKV7ForCausalLM"],
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "vocab_size": 65536,
        "head_dim": 64,
    },
    "Jamba-v0.1": config("JambaForCausalLM", *(32, 4096, 32, 8, 65536), intermediate_size=14336),
    "Nemotron-Nano-9B-v2": config(
        "NemotronHForCausalLM",
        *(56, 4480, 40, 8, 131072),
        head_dim=128,
        hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        intermediate_size=15680,
        mamba_num_heads=128,
        mamba_head_dim=80,
        ssm_state_size=128,
        n_groups=8,
        mamba_ssm_cache_dtype="bfloat16",  # what vLLM's "auto" makes of it
    ),
    "MiniMax-M1": config(
        "MiniMaxM1ForCausalLM",
        *(80, 6144, 64, 8, 200064),
        head_dim=128,
        intermediate_size=9216,
        num_local_experts=32,
        num_experts_per_tok=2,
        attn_type_list=([0] * 7 + [1]) * 10,
    ),
    "MiniMax-M2.5": config(
        "MiniMaxM2ForCausalLM",
        *(62, 3072, 48, 8, 200064),
        head_dim=128,
        intermediate_size=1536,
        num_local_experts=256,
        num_experts_per_tok=8,
        use_qk_norm=True,
        qk_norm_type="per_layer",
        use_routing_bias=True,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_catalogs_layers_and_parameters(name: str) -> None:
    spec, known = ModelSpec.from_hf_config(CONFIGS[name], "mine"), get_model(name)
    assert spec.stack == known.stack
    assert spec.params == known.params
    assert (spec.hidden, spec.vocab, spec.tie_embeddings) == (known.hidden, known.vocab, known.tie_embeddings)


def test_facts_of_the_forward_pass_are_kept_too() -> None:
    shape = {"usual_attention", "usual_ffn", "name", "source", "architecture"}
    published = {"published_params_b", "published_params_source", "aliases"}
    spec = ModelSpec.from_hf_config(LLAMA_8B, "mine")
    assert spec.model_dump(exclude=shape | published) == get_model("Llama-3.1-8B").model_dump(exclude=shape | published)
    changes = {"hidden_act": "gelu", "partial_rotary_factor": 0.5, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    other = ModelSpec.from_hf_config(LLAMA_8B | changes, "mine")
    assert (other.activation, other.rotary_fraction) == ("gelu", 0.5)
    assert other.rope_scaling == OtherRopeScaling(rope_type="yarn")
    assert other.params == spec.params


def test_a_config_without_architectures_is_known_by_its_model_type() -> None:
    for model_type, name in (("llama", "Llama-3.1-8B"), ("gpt_oss", "gpt-oss-20b"), ("qwen3_moe", "Qwen3-30B-A3B")):
        fields = CONFIGS[name] | {"architectures": None, "model_type": model_type}
        assert ModelSpec.from_hf_config(fields, "mine").stack == get_model(name).stack


def test_qwen_windows_begin_at_a_layer_and_only_when_switched_on() -> None:
    fields = CONFIGS["Qwen2.5-7B"] | {"use_sliding_window": True, "max_window_layers": 20}
    stack = ModelSpec.from_hf_config(fields, "mine").stack
    assert [layer.attention.window for layer in stack] == [None] * 20 + [1024] * 8


def test_layers_without_attention_or_network_are_read_block_by_block() -> None:
    def block(group: int | None, width: float | None) -> dict[str, Any]:
        attention = {"no_op": group is None, "n_heads_in_group": group, "replace_with_linear": False}
        return {
            "attention": attention,
            "ffn": {"no_op": width is None, "ffn_mult": width, "replace_with_linear": False},
        }

    fields = config("DeciLMForCausalLM", 3, 8192, 64, 8, 128256)
    spec = ModelSpec.from_hf_config(
        fields | {"block_configs": [block(8, 5.25), block(None, 1.3125), block(8, None)]}, "n"
    )
    assert [(layer.attention.kind, layer.ffn.kind) for layer in spec.stack] == [
        ("gqa", "gated"),
        ("none", "gated"),
        ("gqa", "none"),
    ]
    # multiples of a hidden size times two thirds, as Llama's 28672 = 8192 x 5.25 x 2/3
    assert [getattr(layer.ffn, "intermediate", None) for layer in spec.stack] == [28672, 7168, None]


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
        ({"hidden_size": "wide"}, ["hidden_size", "wide", "positive integer"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers", "-1"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "0", "positive"]),
        ({"num_key_value_heads": 7}, ["attention", "heads 32", "kv_heads 7"]),
        ({"rope_scaling": {"rope_type": "llama3"}}, ["rope_scaling", "factor", "missing"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "1", "each layer"]),
        ({"sliding_window": "all"}, ["wrong type"]),
        ({"vocab_size": True}, ["vocab_size", "True"]),
        ({"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M?"}, ["hybrid_override_pattern"]),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 3}, ["top_k 3"]),
        ({"architectures": ["Gemma4ForCausalLM"], "hidden_size_per_layer_input": -1}, ["per_layer_input", "-1"]),
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


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("value", [None, "odd", -1, [], {}, 1.5, float("nan")])
def test_no_single_odd_value_ends_in_a_traceback(name: str, value: object) -> None:
    for key in CONFIGS[name]:
        try:
            ModelSpec.from_hf_config(CONFIGS[name] | {key: value}, "mine")
        except ModelError as refusal:
            assert "\n" not in str(refusal) and "mine" in str(refusal)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 10**400}, "hidden_size"),
        ({"num_hidden_layers": 10**6}, "at most 10,000"),
        ({"tie_word_embeddings": "no"}, "true or false"),
        ({"rope_scaling": "x"}, "rope_scaling"),
        ({"layer_types": ["nope"] * 2}, "layer_types"),
        ({"architectures": ["Unknown"], "text_config": {"architectures": []}}, "architectures"),
        ({"architectures": ["Unknown"], "text_config": {"architectures": [[1]]}}, "architectures"),
    ],
)
def test_a_config_that_makes_no_sense_says_where(change: dict[str, Any], said: str) -> None:
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
    }
    ModelSpec.from_hf_config(llama, "slip")
    with pytest.raises(ModelError, match=said):
        ModelSpec.from_hf_config(llama | change, "slip")


@pytest.mark.parametrize(
    ("file", "own", "name"),
    [
        ("config.json", {"_name_or_path": "org/Named-7B"}, "Named-7B"),
        ("config.json", {}, "folder"),
        ("gemma.json", {}, "gemma"),
    ],
)
def test_a_config_is_called_as_it_says_or_as_its_file(
    tmp_path: Path, file: str, own: dict[str, str], name: str
) -> None:
    path = tmp_path / "folder" / file
    path.parent.mkdir()
    path.write_text(
        json.dumps(config("LlamaForCausalLM", 2, 64, 4, 2, 100, intermediate_size=128) | own), encoding="utf-8"
    )
    assert resolve_model(str(path)).name == name
