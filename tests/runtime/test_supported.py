"""Is what the decoder does not compute refused in one sentence, before it runs?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from membound.roofline.models import ModelError, get_model
from membound.roofline.models.catalog import catalog
from membound.roofline.scenario import parse_scenario
from membound.runtime.loading.weights import load_safetensors
from membound.runtime.refusals import unmeasured_scenario
from membound.runtime.supported import checked, decoder_problem, recurrent

# the models of the catalog that are not computed, and what is missing
REFUSED = {
    "DeepSeek-V3.2": "attention.indexer",
    "GLM-5": "attention.indexer",
    "GLM-5.2": "attention.indexer",
    "Gemma-4-26B-A4B": "attention.v_is_k",
    "Gemma-4-31B": "attention.v_is_k",
    "MiniMax-M1": "lightning",
    "MiniMax-M3": "attention.indexer",
    **dict.fromkeys(("Gemma-3n-E2B", "Gemma-3n-E4B", "Gemma-4-E2B", "Gemma-4-E4B"), "shares_kv"),
    "Snowflake-Arctic": "norms_per_layer",
    "Step-3": "q_lora_rank",
    "LongCat-Flash-560B-A27B": "zero_experts",
    "Kimi-Linear-48B-A3B": "kda",
    "Kimi-K3": "kda",
    **dict.fromkeys(("LFM2-350M", "LFM2-700M", "LFM2-1.2B", "LFM2-2.6B", "LFM2-8B-A1B", "LFM2-24B-A2B"), "short_conv"),
    **dict.fromkeys((f"Falcon-H1-{size}" for size in ("0.5B", "1.5B", "1.5B-Deep", "3B", "7B", "34B")), "parallel"),
}


def test_all_models_of_the_catalog_are_computed_but_for_these() -> None:
    problems = {name: problem for name, spec in catalog().items() if (problem := decoder_problem(spec))}
    assert problems.keys() == REFUSED.keys()
    for name, problem in problems.items():
        assert REFUSED[name] in problem and name in problem and problem.endswith("."), problem


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention": {"kind": "gqa", "heads": 9, "kv_heads": 3, "head_dim": 32, "v_head_dim": 64}}, ["v_head_dim"]),
        ({"activation": "snake"}, ["activation", "snake", "silu"]),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_in_one_sentence(change: dict[str, Any], words: list[str]) -> None:
    spec = get_model("SmolLM2-135M").model_copy(update={"name": "mine", **change})
    with pytest.raises(ModelError) as refusal:
        checked(spec)
    message = str(refusal.value)
    assert all(word in message for word in [*words, "mine"]), message
    assert message.endswith(".") and "\n" not in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["InternLM2ForCausalLM"]}, ["architecture", "InternLM2ForCausalLM", "LlamaForCausalLM"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["rope_scaling", "dynamic", "yarn"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, ["rope_scaling", "two"]),
        ({"final_logit_softcapping": -1}, ["final_softcap", "-1"]),
    ],
)
def test_a_folder_is_refused_before_its_weights_are_read(
    change: dict[str, Any], words: list[str], reference: Path, tmp_path: Path
) -> None:
    config = json.loads((reference / "tiny_llama3" / "config.json").read_text())
    shutil.copytree(reference / "tiny_llama3", tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").unlink()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError) as refusal:
        load_safetensors(tmp_path / "other")
    message = str(refusal.value)
    assert all(word in message for word in [*words, "other"]) and "\n" not in message, message


def test_a_model_is_recurrent_if_one_of_its_layers_is() -> None:
    assert recurrent(get_model("Mamba-2-130M")) and recurrent(get_model("Jamba-v0.1"))
    assert not recurrent(get_model("Gemma-2-2B")) and not recurrent(get_model("DeepSeek-V3"))


_SCENARIO: dict[str, Any] = {
    "name": "mine",
    "model": "Mamba-2-130M[:2]",
    "workload": {
        "arrivals": {"kind": "closed_loop", "concurrency": 1},
        "requests": 1,
        "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 8}},
        "output_tokens": {"kind": "fixed", "tokens": 2},
    },
}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"techniques": ["medusa"]}, "medusa drafts are trees"),
        ({"engine": {"prefix_caching": True}}, "engine.prefix_caching"),
        ({"engine": {"preemption": "swap", "host_kv_gib": 1}}, "engine.preemption"),
    ],
)
def test_what_takes_tokens_back_is_refused_for_recurrent_models_alone(change: dict[str, Any], word: str) -> None:
    problem = unmeasured_scenario(parse_scenario(_SCENARIO | change))
    assert problem and word in problem and "Mamba-2-130M[:2]" in problem and "recurrent state" in problem
    assert unmeasured_scenario(parse_scenario(_SCENARIO)) is None
    assert unmeasured_scenario(parse_scenario(_SCENARIO | change | {"model": "Mixtral-8x7B[:1]"})) is None
