"""Is what the decoder would compute wrongly refused in one sentence, before it runs?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from membound.roofline.models import ModelError, ModelSpec, get_model
from membound.runtime.supported import plain_attention, plain_decoder_problem
from membound.runtime.weights import load_safetensors, random_weights

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


@pytest.mark.parametrize("name", ["Llama-2-7B", "Llama-3.1-8B", "Qwen2.5-7B", "Qwen3-8B", "SmolLM2-135M"])
def test_llama_and_qwen_are_computed(name: str) -> None:
    assert plain_decoder_problem(get_model(name)) is None
    assert plain_attention(get_model(name)) == get_model(name).attention


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2},
            ["Mixtral", "Qwen3"],
        ),
        ({"architectures": ["GemmaForCausalLM"], "head_dim": 128}, ["architecture", "GemmaForCausalLM"]),
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "Llama"]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, ["attention.window", "4096"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling", "yarn", "llama3"]),
        ({"hidden_act": "gelu"}, ["activation", "gelu", "silu"]),
        ({"attention_bias": True}, ["o_bias", "false"]),
        ({"mlp_bias": True}, ["ffn.bias", "false"]),
        ({"partial_rotary_factor": 0.5}, ["rotary_fraction", "0.5", "1.0"]),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_in_one_sentence(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as refusal:
        plain_attention(ModelSpec.from_hf_config(LLAMA | change, "mine"))
    message = str(refusal.value)
    assert all(word in message for word in [*words, "mine"]), message
    assert message.endswith(".") and "\n" not in message


def test_layers_that_differ_are_refused() -> None:
    spec = ModelSpec(
        **get_model("SmolLM2-135M").model_dump(by_alias=True, exclude={"name", "overrides"})
        | {"name": "mixed", "overrides": [{"layers": "1::2", "attention": {"window": 64}}]}
    )
    with pytest.raises(ModelError, match="layers of mixed differ"):
        random_weights(spec, seed=0)


def test_a_folder_of_another_family_is_refused_before_its_weights_are_read(reference: Path, tmp_path: Path) -> None:
    config = json.loads((reference / "tiny_llama3" / "config.json").read_text())
    shutil.copytree(reference / "tiny_llama3", tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"architectures": ["InternLM2ForCausalLM"]}))
    with pytest.raises(ModelError, match="architecture of other is 'InternLM2ForCausalLM'"):
        load_safetensors(tmp_path / "other")
