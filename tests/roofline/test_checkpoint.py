"""Is a model that is published quantized costed so, unless a technique says otherwise?"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from membound.roofline.errors import MemboundError
from membound.roofline.memory import weights_bytes
from membound.roofline.models import ModelError, ModelSpec, catalog, get_model
from membound.roofline.models.checkpoint import named_checkpoint
from membound.roofline.models.files import published_formats, resolve_model
from membound.roofline.models.spec import build
from membound.roofline.operating_point import OperatingPoint
from membound.roofline.precision.plan import PrecisionPlan
from membound.roofline.scenario import Scenario, load_scenario, parse_scenario
from membound.roofline.speculation.steps import Speculation
from membound.roofline.techniques import (
    W8A8,
    DraftModelSpeculation,
    EngineSetup,
    Int8Weights,
    KvQuantization,
    Sparsity24,
    WeightQuantization,
    engine_setup,
)

PLAIN = PrecisionPlan()
QUANTIZED = [name for name, spec in catalog().items() if spec.checkpoint is not None]
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
MOE: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
}


def scenario(model: str, hardware: str = "H200-SXM", tp: int = 1, **more: Any) -> Scenario:
    workload = {
        "arrivals": {"kind": "poisson", "rate_rps": 1.0},
        "requests": 4,
        "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 500}},
        "output_tokens": {"kind": "fixed", "tokens": 100},
    }
    fields = {"name": "published", "model": model, "hardware": hardware, "parallel": {"tp": tp}, "workload": workload}
    return parse_scenario(fields | more)


def point(model: str, hardware: str, tp: int = 1, **more: Any) -> OperatingPoint:
    return OperatingPoint.of(scenario(model, hardware, tp, **more), batch=8, context=4096, phase="decode")


def quantized(config: dict[str, Any], **quantization: Any) -> ModelSpec:
    return ModelSpec.from_hf_config(config | {"quantization_config": quantization}, "Mine")


def scheme(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


# --- what is published ---


@pytest.mark.parametrize(
    ("model", "gigabytes", "tolerance"),
    [
        # 671B parameters of a byte each (DeepSeek-V3 paper), and tables of 2 x 0.93B in two
        ("DeepSeek-V3", 671, 0.01),
        # checkpoint sizes of the gpt-oss model card, table 1, in GiB: 60.8 and 12.8 (from memory)
        ("gpt-oss-120b", 60.8 * 2**30 / 1e9, 0.02),
        ("gpt-oss-20b", 12.8 * 2**30 / 1e9, 0.02),
        # sizes of the repositories that publish them (from memory), the vision encoder of the second among them
        ("Kimi-K2", 1030, 0.01),
        ("Kimi-K2.5", 595, 0.01),
    ],
)
def test_published_weights_take_what_their_checkpoint_takes(model, gigabytes, tolerance):
    setup = scenario(model).setup
    assert weights_bytes(get_model(model), EngineSetup(setup.precision)) / 1e9 == pytest.approx(
        gigabytes, rel=tolerance
    )


def test_deepseek_v3_fits_eight_h200_as_it_is_published_and_not_in_16_bits():
    published = point("DeepSeek-V3", "H200-SXM", 8)
    plain = point("DeepSeek-V3", "H200-SXM", 8, techniques=[{"name": "weight_quantization", "format": "bf16"}])
    assert published.fits and not plain.fits
    assert published.time_s < plain.time_s


def test_gpt_oss_120b_fits_one_h100_as_it_is_published_and_not_in_16_bits():
    assert point("gpt-oss-120b", "H100-SXM5").fits
    techniques = [{"name": "weight_quantization", "format": "bf16"}]
    assert not point("gpt-oss-120b", "H100-SXM5", techniques=techniques).fits


def test_gpt_oss_has_only_its_experts_in_mxfp4_and_multiplies_16_bits():
    plan = get_model("gpt-oss-20b").published
    assert (plan.weights_of("experts").name, plan.activations.name, plan.kv.name) == ("mxfp4", "bf16", "bf16")
    assert {plan.weights_of(part).name for part in ("attention", "router", "lm_head", "embedding")} == {"bf16"}


@pytest.mark.parametrize("model", QUANTIZED)
def test_every_published_format_has_a_source_and_fewer_bytes(model):
    spec = get_model(model)
    assert spec.checkpoint.source
    fewer = weights_bytes(spec, EngineSetup(spec.published))
    assert 0.2 < fewer / weights_bytes(spec, EngineSetup()) < 0.6


def test_a_model_without_a_checkpoint_has_16_bits():
    assert [name for name, spec in catalog().items() if spec.published != PLAIN] == QUANTIZED
    assert not {"Llama-3.1-8B", "SmolLM2-135M", "Qwen3-8B", "GLM-5"} & {*QUANTIZED}


# --- what a scenario makes of it ---


@pytest.mark.parametrize("model", QUANTIZED)
@pytest.mark.parametrize(
    "technique", [WeightQuantization(format="bf16"), WeightQuantization(format="awq"), Int8Weights(), W8A8()]
)
def test_a_technique_that_sets_weights_leaves_nothing_of_the_published_ones(model, technique):
    setup = scenario(model, techniques=[technique.model_dump()]).setup
    assert setup == engine_setup([technique])
    assert scenario(model).with_techniques((technique,)).setup.precision == setup.precision


def test_other_techniques_are_on_top_of_the_published_formats():
    setup = scenario("DeepSeek-V3", techniques=[{"name": "kv_quantization"}, {"name": "sparsity_2_4"}]).setup
    assert (setup.weights.name, setup.kv.name) == ("fp8_block_sparse24", "fp8")
    assert setup.precision.activations.name == "fp8_g128"


@pytest.mark.parametrize("technique", [KvQuantization(), Sparsity24(), W8A8(), Int8Weights(), WeightQuantization()])
def test_the_words_of_a_baseline_name_the_published_format(technique):
    plain, published = EngineSetup(), scenario("DeepSeek-V3").setup
    assert technique.compared_with(plain) == technique.baseline
    said = technique.compared_with(published)
    assert ("fp8_block weights" in said) == technique.sets_weights
    assert technique.sets_weights <= ("bf16 weights" not in said)


def test_a_model_that_cannot_be_read_fails_where_it_is_used(tmp_path):
    for model in ("no-such-model", str(tmp_path / "config.json"), str(tmp_path / "none.gguf"), "x" * 5000, "a\0b"):
        assert scenario(model).setup == EngineSetup()
    with pytest.raises(ModelError, match="no-such-model"):
        OperatingPoint.of(scenario("no-such-model"), batch=1, context=1, phase="decode")


def test_a_scenario_sees_a_config_that_changed(tmp_path: Path):
    file = tmp_path / "config.json"
    for index, bits in enumerate((4, 8)):
        fields = {"quant_method": "gptq", "bits": bits, "group_size": 128}
        file.write_text(json.dumps(LLAMA | {"quantization_config": fields}))
        os.utime(file, (index, index))
        assert scenario(str(file)).setup.weights.name == f"int{bits}_g128"
        assert published_formats(str(tmp_path)) == published_formats(str(file))


def test_the_shipped_scenario_of_the_cpu_has_the_set_up_of_its_techniques_alone():
    live = load_scenario("live-cpu")
    assert live.setup.precision == engine_setup(live.techniques).precision
    assert live.with_techniques(()).setup.precision == PLAIN


def test_a_drafter_has_the_formats_of_its_own_checkpoint():
    drafts = DraftModelSpeculation(draft="Moonlight-16B-A3B")  # with Kimi-K2's tokens
    kimi, setup = get_model("Kimi-K2"), scenario("Kimi-K2", techniques=[drafts.model_dump()]).setup
    own, shared = Speculation(kimi, setup), Speculation(kimi, engine_setup([drafts, W8A8()]))
    assert own.drafter_weights_bytes > 1.5 * shared.drafter_weights_bytes


def test_an_operating_point_still_takes_less_than_a_millisecond():
    chosen = scenario("gpt-oss-20b")
    taken_s = []
    for _ in range(20):
        start = time.process_time()
        OperatingPoint.of(chosen, batch=8, context=4096, phase="decode")
        taken_s.append(time.process_time() - start)
    assert min(taken_s) < 1e-3


# --- what a config.json says ---


@pytest.mark.parametrize(
    ("quantization", "weights", "activations"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}, "fp8_block", "fp8_g128"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8", "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "fp8_row", "fp8_row"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "int4_g128_zero", "bf16"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": False}, "int4_g64", "bf16"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}, "int4_g128", "bf16"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": False}, "int8_row_zero", "bf16"),
        ({"quant_method": "mxfp4"}, "mxfp4", "bf16"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8", "int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4", "bf16"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, "nf4_dq", "bf16"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, "nvfp4", "nvfp4"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "W4A16_AWQ"}}, "int4_g128", "bf16"),
        ({"quant_algo": "FP8", "producer": {"name": "modelopt"}}, "fp8", "fp8"),
        (scheme({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}), "int4_g32", "bf16"),
        (
            scheme({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False}),
            *("int4_g64_zero", "bf16"),
        ),
        (
            scheme({"num_bits": 8, "type": "int", "strategy": "channel"}, {"num_bits": 8, "type": "int"}),
            *("int8", "int8"),
        ),
        (
            scheme(
                {"num_bits": 8, "type": "float", "strategy": "channel"},
                {"num_bits": 8, "type": "float", "strategy": "token"},
            ),
            *("fp8_row", "fp8_row"),
        ),
        (
            scheme(
                {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
                {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128},
            ),
            *("fp8_block", "fp8_g128"),
        ),
        (
            scheme(
                {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
                {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            ),
            *("nvfp4", "nvfp4"),
        ),
        (
            scheme({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}) | {"format": "marlin-24"},
            *("int4_g128_sparse24", "bf16"),
        ),
    ],
)
def test_a_quantization_config_says_the_formats(quantization, weights, activations):
    plan = quantized(LLAMA, **quantization).published
    assert (plan.weights.name, plan.activations.name, plan.kv.name) == (weights, activations, "bf16")
    assert plan.weights_of("lm_head").name == "bf16"


@pytest.mark.parametrize("absent", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_a_config_without_quantization_is_in_16_bits(absent):
    assert ModelSpec.from_hf_config(LLAMA | absent, "Mine") == ModelSpec.from_hf_config(LLAMA, "Mine")
    assert ModelSpec.from_hf_config(LLAMA | absent, "Mine").checkpoint is None


@pytest.mark.parametrize(
    ("left_out", "plain"),
    [
        (["lm_head", "re:.*self_attn.*"], {"attention"}),
        (["model.layers.*.self_attn", "model.layers.*.mlp.gate"], {"attention"}),
        ([f"model.language_model.layers.{layer}.self_attn*" for layer in range(32)], {"attention"}),
        ([f"model.layers.{layer}.mlp.experts.0.down_proj" for layer in range(32)], {"experts"}),
        # a few layers, words within others, and norms leave every part as it is
        (["gate", "model.layers.1*", "e_score_correction_bias", "model.layers.0.self_attn"], set()),
        ([f"model.layers.{layer}.input_layernorm" for layer in range(32)], set()),
    ],
)
def test_parts_that_are_left_out_in_most_layers_stay_in_16_bits(left_out, plain):
    spec = quantized(MOE, quant_method="fp8", modules_to_not_convert=left_out)
    parts = ("attention", "ffn", "experts", "shared_experts")
    assert {part for part in parts if spec.published.weights_of(part).width == 16} == plain


def test_the_quantization_of_a_multimodal_config_is_found_at_both_places():
    quantization = {"quantization_config": {"quant_method": "fp8"}}
    whole = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": MOE}
    for config in (whole | quantization, whole | {"text_config": MOE | quantization}):
        assert ModelSpec.from_hf_config(config, "Mine").published.weights.name == "fp8"


def test_model_optimizers_file_beside_a_config_is_read(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert resolve_model(str(tmp_path)).checkpoint is None
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert resolve_model(str(tmp_path)).published.weights.name == "nvfp4"


def layers_in(layers: int, **algorithms: str) -> dict[str, dict[str, str]]:
    """ModelOpt's `quantized_layers` of so many layers: an algorithm for each module, its dots as `__`."""
    return {
        f"model.layers.{layer}.{module.replace('__', '.')}": {"quant_algo": algorithm}
        for layer in range(layers)
        for module, algorithm in algorithms.items()
    }


def mixed(config: dict[str, Any], layers: dict[str, dict[str, str]]) -> ModelSpec:
    return quantized(config, quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers)


def test_modules_of_several_formats_give_each_part_its_own():
    """As ModelOpt writes FP8 attention beside NVFP4 networks; each part multiplies in the wider of its two formats."""
    spec = mixed(
        LLAMA, layers_in(32, self_attn__o_proj="FP8", mlp__down_proj="NVFP4") | {"lm_head": {"quant_algo": "FP8"}}
    )
    plan = spec.published
    assert {part: plan.weights_of(part).name for part in ("attention", "ffn", "lm_head", "embedding")} == {
        "attention": "fp8",
        "ffn": "nvfp4",
        "lm_head": "fp8",
        "embedding": "bf16",
    }
    assert plan.activations.name == "nvfp4"
    plain, whole = (
        weights_bytes(one, EngineSetup(precision=one.published))
        for one in (ModelSpec.from_hf_config(LLAMA, "Mine"), spec)
    )
    attention = 32 * 4096 * (4096 + 2 * 1024 + 4096)
    network, table = 32 * 3 * 4096 * 14336, 128256 * 4096
    saved = attention * (2 - 1) + network * (2 - 4.5 / 8) + table * (2 - 1)
    assert plain - whole == pytest.approx(saved, rel=1e-3)


def test_a_part_has_the_format_of_most_of_its_layers_and_without_one_16_bits():
    for first, expected in ((10, "bf16"), (20, "nvfp4")):
        layers = layers_in(32, self_attn__o_proj="FP8") | layers_in(first, mlp__experts__0__down_proj="NVFP4")
        assert mixed(MOE, layers).published.weights_of("experts").name == expected
    beside = {"quantized_layers": layers_in(32, mlp__experts__0__down_proj="NVFP4")}
    spec = quantized(MOE, quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers=beside)
    assert spec.published.weights_of("experts").name == "nvfp4"
    assert spec.published.weights_of("attention").name == "bf16"


def test_parts_with_16_bit_and_narrower_inputs_are_refused():
    with pytest.raises(ModelError, match="ffn multiply int4_g128 with bf16 where other parts have fp8"):
        mixed(LLAMA, layers_in(32, self_attn__o_proj="FP8", mlp__down_proj="W4A16_AWQ"))


@pytest.mark.parametrize(
    ("quantization", "sentence"),
    [
        (
            {"quant_method": "hocus"},
            r"of Mine is .hocus., which is not supported: it must be one of fp8",
        ),
        ({"bits": 4}, r"quant_method .* is ''"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]; it must be"),
        ({"quant_method": "gptq"}, "the bits of a weight are missing"),
        ({"quant_method": "gptq", "bits": 9}, "int9_g128"),
        ({"quant_method": "gptq", "bits": "four"}, "four"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            "quantized_layers, which says of what, is missing",
        ),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"model.layers.0.mlp.down_proj": {"quant_algo": "A"}},
            },
            "quant_algo A is not supported",
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"visual.proj": {"quant_algo": "FP8"}}},
            "names no matrix",
        ),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups is empty"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["re:("]}, r"cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(quantization, sentence):
    with pytest.raises(ModelError, match=sentence) as caught:
        quantized(LLAMA, **quantization)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_a_model_file_may_name_a_format_alone_and_no_other():
    fields = json.loads(get_model("Llama-3.1-8B").model_dump_json(by_alias=True))
    assert build(**fields | {"checkpoint": "nvfp4"}).published.weights.name == "nvfp4"
    for wrong in ("nvfp5", {"weights": "fp8", "plain": ["head"]}):
        with pytest.raises(MemboundError, match="checkpoint") as caught:
            build(**fields | {"checkpoint": wrong})
        assert "\n" not in str(caught.value)


# --- what predict says of it ---


@pytest.mark.parametrize(
    ("model", "techniques", "words"),
    [
        (
            "DeepSeek-V3",
            [],
            "weights fp8_block (as published), activations fp8 per 128, cache bf16; router, lm_head, embedding bf16",
        ),
        ("Llama-3.1-8B", [], "weights bf16 (as nothing quantizes them), activations bf16, cache bf16"),
        (
            "DeepSeek-V3",
            [{"name": "weight_quantization", "format": "bf16"}, {"name": "kv_quantization"}],
            "weights bf16 (by a technique, published in fp8_block), activations bf16, cache fp8",
        ),
        (
            "Llama-3.1-8B",
            [{"name": "w8a8"}],
            "weights fp8 (by a technique), activations fp8, cache bf16; lm_head, embedding bf16",
        ),
    ],
)
def test_predict_says_the_formats_and_who_says_so(model, techniques, words):
    here = point(model, "H200-SXM", 8, techniques=techniques)
    formats = here.to_json()["formats"]
    assert formats["words"] == words
    assert formats["parts"].keys() == here.to_json()["memory"]["weights_by_part"].keys()
    assert formats["weights"] == here.setup.weights.name


@pytest.mark.parametrize(
    ("name", "weights", "activations"),
    [
        ("Qwen/Qwen3-32B-FP8", "fp8_block", "fp8_g128"),
        ("Qwen3-32B-FP8", "fp8_block", "fp8_g128"),
        ("RedHatAI/Qwen3-32B-FP8-dynamic", "fp8_row", "fp8_row"),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "fp8", "fp8"),
        ("nvidia/Llama-3.3-70B-Instruct-FP4", "nvfp4", "nvfp4"),
        ("Qwen/Qwen3-32B-AWQ", "int4_g128_zero", "bf16"),
        ("hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4", "int4_g128_zero", "bf16"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "int4", "bf16"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "int8", "bf16"),
        ("neuralmagic/Meta-Llama-3.1-70B-Instruct-quantized.w8a8", "int8", "int8"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "int4", "bf16"),
        ("unsloth/Llama-3.1-8B-Instruct-bnb-4bit", "nf4", "bf16"),
        ("Llama-3.1-8B-Instruct-Q4_K_M", "q4_k_m", "bf16"),
    ],
)
def test_the_name_of_a_checkpoint_tells_its_formats(name, weights, activations):
    precision = scenario(name).setup.precision
    assert (precision.weights.name, precision.activations.name) == (weights, activations)
    step = OperatingPoint.of(scenario(name), batch=1, context=64, phase="decode")
    assert "(as published)" in step.formats.words


@pytest.mark.parametrize("name", [*catalog(), "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-235B-A22B-Instruct-2507"])
def test_a_name_without_a_format_tells_none(name):
    assert named_checkpoint(name) is None
    assert published_formats(name) == get_model(name).published


def test_a_technique_takes_the_place_of_the_formats_in_a_name():
    awq = {"name": "weight_quantization", "format": "awq"}
    assert scenario("Qwen3-32B-FP8", techniques=[awq]).setup == scenario("Qwen3-32B", techniques=[awq]).setup
    undone = {"name": "weight_quantization", "format": "bf16"}
    assert scenario("Qwen3-32B-FP8", techniques=[undone]).setup.precision.weights.name == "bf16"
