"""Is the text of models that see or hear read from where their config has it, with what it does not read beside it?"""

from __future__ import annotations

from typing import Any

import pytest

from membound.roofline.hardware import get_hardware
from membound.roofline.memory import cache_terms, weights_by_part, weights_bytes
from membound.roofline.models import GroupedQueryAttention, ModelError, ModelSpec, get_model
from membound.roofline.models.huggingface.multimodal import encoder_params
from membound.roofline.operating_point import OperatingPoint
from membound.roofline.scenario import load_scenario
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import EngineSetup
from membound.simulator.run import run

PLAIN = EngineSetup()
H100 = get_hardware("H100-SXM5")


def text(model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> Any:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        **more,
    }


def kinds(layers: int, every: int) -> list[str]:
    return ["full_attention" if (index + 1) % every == 0 else "sliding_attention" for index in range(layers)]


QWEN = text("qwen2", 28, 3584, 28, 4, 152064, intermediate_size=18944)
INPUTS = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "sliding_window": 512}
GEMMA_4 = INPUTS | {"head_dim": 256, "global_head_dim": 512}
CLIP = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "patch_size": 14, "image_size": 336}

CONFIGS = {
    "LLaVA-1.5-7B": {
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000},
        "vision_config": CLIP,
    },
    "LLaVA-v1.6-mistral-7B": {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "text_config": text("mistral", 32, 4096, 32, 8, 32000, intermediate_size=14336),
    },
    "Qwen2.5-VL-7B": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": QWEN | {"model_type": "qwen2_5_vl_text"},
    },
    "Qwen2.5-Omni-7B": {
        "architectures": ["Qwen2_5OmniModel"],
        "thinker_config": {"text_config": QWEN | {"model_type": "qwen2_5_omni_text"}, "vision_config": CLIP},
    },
    "InternVL3-8B": {
        "architectures": ["InternVLChatModel"],
        "llm_config": QWEN | {"architectures": ["Qwen2ForCausalLM"]},
        "vision_config": CLIP,
    },
    "MiniCPM-V-4.5": text("minicpmv", 36, 4096, 32, 8, 151936, intermediate_size=12288, head_dim=128)
    | {"architectures": ["MiniCPMV"], "version": 4.5},
    "MiniCPM-V-2_6": QWEN | {"architectures": ["MiniCPMV"], "version": 2.6},
    "Gemma-3-4B": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
    },
    "GLM-4.1V-9B": {
        "architectures": ["Glm4vForConditionalGeneration"],
        "text_config": text("glm4v_text", 40, 4096, 32, 2, 151552, intermediate_size=13696),
    },
    "Llama-3.2-11B-Vision": {
        "architectures": ["MllamaForConditionalGeneration"],
        "text_config": text("mllama_text_model", 40, 4096, 32, 8, 128256, intermediate_size=14336)
        | {"cross_attention_layers": list(range(3, 40, 5))},
        "vision_config": CLIP,
    },
    "Gemma-3n-E4B": {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "text_config": text("gemma3n_text", 35, 2048, 8, 2, 262400, head_dim=256)
        | INPUTS
        | {"intermediate_size": [16384] * 35, "num_kv_shared_layers": 15, "layer_types": kinds(35, 5)},
    },
    "Gemma-4-E2B": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": text("gemma4_text", 35, 1536, 8, 1, 262144, intermediate_size=6144)
        | GEMMA_4
        | {"num_kv_shared_layers": 20, "use_double_wide_mlp": True, "layer_types": kinds(35, 5)},
    },
    "Gemma-4-E4B": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": text("gemma4_text", 42, 2560, 8, 2, 262144, intermediate_size=10240)
        | GEMMA_4
        | {"num_kv_shared_layers": 18, "layer_types": kinds(42, 6)},
    },
    "Gemma-4-26B-A4B": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": text("gemma4_text", 30, 2816, 16, 8, 262144, intermediate_size=2112)
        | {"head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
        | {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
        | {"sliding_window": 1024, "layer_types": kinds(30, 6)},
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_catalogs_layers_and_parameters(name: str) -> None:
    spec, known = ModelSpec.from_hf_config(CONFIGS[name], "mine"), get_model(name)
    assert spec.stack == known.stack
    assert spec.params == known.params


def test_layers_without_a_window_have_none_where_most_have_one() -> None:
    """What the usual layer gives is not taken by the others."""
    for name in ("Gemma-4-E2B", "Gemma-4-26B-A4B"):
        stack = ModelSpec.from_hf_config(CONFIGS[name], "mine").stack
        marks = CONFIGS[name]["text_config"]["layer_types"]
        assert [layer.attention.window is None for layer in stack] == [mark == "full_attention" for mark in marks]


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("Gemma-3n-E4B", 6835235568),
        ("Gemma-3n-E2B", 4435182688),
        ("Gemma-4-E4B", 7463013376),
        ("Gemma-4-E2B", 4628569344),
    ],
)
def test_parameters_are_those_of_transformers_own_text_model(name: str, params: int) -> None:
    """Counted from transformers 5.24.0's modules for the same config."""
    assert get_model(name).params == params


@pytest.mark.parametrize(
    ("vision", "published"),
    [
        (CLIP, 304e6),  # CLIP ViT-L/14 at 336 pixels
        # SigLIP So400m/14, of Gemma 3
        (
            {
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "patch_size": 14,
                "image_size": 896,
            },
            417e6,
        ),
        # Llama 3.2 Vision: transformers 5.24.0's MllamaVisionModel
        (
            {
                "hidden_size": 1280,
                "intermediate_size": 5120,
                "num_hidden_layers": 32,
                "num_global_layers": 8,
                "patch_size": 14,
                "image_size": 448,
            },
            836288019,
        ),
    ],
)
def test_an_encoders_parameters_are_about_the_known_ones(vision: dict[str, Any], published: float) -> None:
    assert encoder_params(vision) == pytest.approx(published, rel=0.07)


def test_an_encoder_that_a_config_does_not_describe_counts_nothing() -> None:
    assert encoder_params({"model_type": "siglip"}) == encoder_params(None) == 0


def amounts(model: ModelSpec) -> list[tuple[str, float, float]]:
    operators = step_operators(model, PLAIN, StepShape.decode(4, 1000))
    return [(op.name, float(op.flops) * op.calls, float(op.bytes) * op.calls) for op in operators]


def test_what_text_does_not_read_takes_memory_and_no_time() -> None:
    seeing = get_model("Llama-3.2-11B-Vision")
    blind = seeing.model_copy(update={"idle_params": 0})
    assert amounts(seeing) == amounts(blind) == amounts(get_model("Llama-3.1-8B"))
    assert weights_bytes(seeing, PLAIN) == weights_bytes(blind, PLAIN) + 2 * seeing.idle_params
    assert weights_by_part(seeing, PLAIN)["idle"] == 2 * seeing.idle_params


def test_layers_that_share_kv_read_it_and_leave_none() -> None:
    own = get_model("Llama-3.1-8B")
    sharing = own.model_copy(update={"overrides": ({"layers": "16:", "attention": {"shares_kv": True}},)})
    assert sharing.kv_bytes_per_token(16) == own.kv_bytes_per_token(16) / 2
    assert cache_terms(sharing, PLAIN).bytes(1000) == cache_terms(own, PLAIN).bytes(1000) / 2

    def attention_bytes(model: ModelSpec) -> float:
        return sum(moved for name, _, moved in amounts(model) if name.endswith("attention"))

    assert attention_bytes(sharing) == attention_bytes(own)
    without = GroupedQueryAttention(heads=32, kv_heads=8, head_dim=128, shares_kv=True)
    assert own.params - sharing.params == 16 * 2 * 8 * 128 * 4096
    assert without.vectors(4096) == 0


def test_a_table_of_layers_inputs_takes_memory_and_a_row_a_token() -> None:
    plain = get_model("Llama-3.1-8B")
    with_inputs = plain.model_copy(update={"per_layer_input": {"vocab": 100_000, "width": 256}})
    table = 100_000 * 256 * plain.layers
    more = weights_bytes(with_inputs, PLAIN) - weights_bytes(plain, PLAIN)
    assert more > 2 * table and with_inputs.params - plain.params > table
    read = sum(moved for _, _, moved in amounts(with_inputs)) - sum(moved for _, _, moved in amounts(plain))
    matrices = 3 * plain.layers * 256 * plain.hidden
    assert 2 * matrices < read < 3 * matrices < table
    flops = sum(each for _, each, _ in amounts(with_inputs)) - sum(each for _, each, _ in amounts(plain))
    assert flops == pytest.approx(2 * 4 * matrices)


def test_what_runs_beside_a_layer_is_shown_with_its_network() -> None:
    model = get_model("Gemma-3n-E4B")
    point = OperatingPoint(model, hardware=H100, setup=PLAIN, phase="decode", batch=4, context=2048)
    groups = {group["name"]: group["operators"] for group in point.to_json()["groups"]}
    beside = {name for one in model.besides for name, _, _ in one.layer_linears(model.hidden)}
    assert beside <= {name.rsplit(".", 1)[-1] for name in groups["ffn"]}
    assert {name.rsplit(".", 1)[-1] for name in groups["attention"]} == {"qkv", "attention", "o"}


@pytest.mark.parametrize("name", ["Gemma-3n-E4B", "Gemma-4-E2B", "Llama-3.2-11B-Vision"])
def test_it_is_predicted_and_simulated(name: str) -> None:
    point = OperatingPoint(get_model(name), hardware=H100, setup=PLAIN, phase="decode", batch=4, context=2048)
    read = sum(cost.operator.weight_bytes * cost.operator.calls for cost in point.cost.operators)
    assert point.cost.time_s > float(read) / H100.bandwidth_bytes_per_s > 0
    scenario = load_scenario("live-cpu").with_techniques(()).with_value("model", name).with_value("hardware", "H200")
    scenario = scenario.with_value("workload.requests", 8)
    scenario = scenario.with_value(
        "workload.prompts", {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 500}}
    )
    assert run(scenario).requests["completed"].sum() == 8


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["MiniCPMV"], "version": 9.9}, ["MiniCPMV", "not supported"]),
        ({"architectures": ["WhisperForConditionalGeneration"], "text_config": {"model_type": "x"}}, ["Whisper"]),
        ({"architectures": ["LlavaNextForConditionalGeneration"], "text_config": []}, ["LlavaNext", "no language"]),
    ],
)
def test_a_nested_config_without_a_known_decoder_is_refused(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as refusal:
        ModelSpec.from_hf_config(config, "mine")
    assert all(word in str(refusal.value) for word in words[:1]), str(refusal.value)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("llava-hf/llava-1.5-7b-hf", "Llama-2-7B"),
        ("llava:13b", "Llama-2-13B"),
        ("Qwen/Qwen2-VL-72B-Instruct-AWQ", "Qwen2-72B"),
        ("qwen2.5vl:7b", "Qwen2.5-7B"),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct-FP8", "Qwen3-30B-A3B"),
        ("OpenGVLab/InternVL3_5-8B", "Qwen3-8B"),
        ("openbmb/MiniCPM-V-2_6", "Qwen2-7B"),
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", "Llama-3.2-11B-Vision"),
        ("llama3.2-vision:90b", "Llama-3.2-90B-Vision"),
        ("google/gemma-3n-E4B-it", "Gemma-3n-E4B"),
        ("gemma3n:e2b", "Gemma-3n-E2B"),
        ("zai-org/GLM-4.1V-9B-Thinking", "GLM-4-9B-0414"),
    ],
)
def test_names_of_hubs_and_registries_resolve(name: str, known: str) -> None:
    assert get_model(name) is get_model(known)
