"""Do models that mix attention with convolutions, Mamba-2 or delta rules read, count and cost as their parts do?"""

from __future__ import annotations

from typing import Any

import pytest
from config_json import config

from membound.roofline.hardware import get_hardware
from membound.roofline.memory import cache_terms
from membound.roofline.models import (
    DenseFfn,
    GroupedQueryAttention,
    Mamba2,
    ModelError,
    ModelSpec,
    ParallelMixers,
    ShortConv,
    get_model,
)
from membound.roofline.operating_point import OperatingPoint
from membound.roofline.parallel import Parallelism
from membound.roofline.scenario import load_scenario
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import EngineSetup
from membound.simulator.run import run

PLAIN = EngineSetup()
H100 = get_hardware("H100-SXM5")
MIXED = ("Falcon-H1-7B", "Granite-4.0-H-Tiny", "LFM2-1.2B", "LFM2-8B-A1B", "Kimi-Linear-48B-A3B", "Bamba-9B")


def kinds(layers: int, attends: Any, attention: str, other: str) -> list[str]:
    return [attention if index in attends else other for index in range(layers)]


CONFIGS = {
    "Granite-4.0-H-Small": config(
        "GraniteMoeHybridForCausalLM",
        *(40, 4096, 32, 8, 100352),
        layer_types=kinds(40, (5, 15, 25, 35), "attention", "mamba"),
        mamba_n_heads=128,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        num_local_experts=72,
        num_experts_per_tok=10,
        intermediate_size=768,
        shared_intermediate_size=1536,
        tie_word_embeddings=True,
    ),
    "Granite-4.0-H-Micro": config(
        "GraniteMoeHybridForCausalLM",
        *(40, 2048, 32, 8, 100352),
        layer_types=kinds(40, (5, 15, 25, 35), "attention", "mamba"),
        mamba_n_heads=64,
        mamba_d_head="auto",
        mamba_d_state=128,
        num_local_experts=0,
        intermediate_size=8192,
        shared_intermediate_size=8192,
        tie_word_embeddings=True,
    ),
    "Bamba-9B": config(
        "BambaForCausalLM",
        *(32, 4096, 32, 8, 128256),
        attn_layer_indices=[9, 18, 27],
        mamba_n_heads=128,
        mamba_d_head=64,
        mamba_d_state=128,
        intermediate_size=14336,
    ),
    "Falcon-H1-0.5B": config(
        "FalconH1ForCausalLM",
        *(36, 1024, 8, 2, 32784),
        head_dim=64,
        intermediate_size=2048,
        mamba_d_ssm=1536,
        mamba_n_heads=24,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_rms_norm=False,
    ),
    "LFM2-1.2B": config(
        "Lfm2ForCausalLM",
        *(16, 2048, 32, 8, 65536),
        block_ff_dim=12288,
        full_attn_idxs=[2, 5, 8, 10, 12, 14],
        conv_L_cache=3,
        tie_embedding=True,
    ),
    "LFM2-8B-A1B": config(
        "Lfm2MoeForCausalLM",
        *(24, 2048, 32, 8, 65536),
        intermediate_size=7168,
        moe_intermediate_size=1792,
        num_experts=32,
        num_experts_per_tok=4,
        num_dense_layers=2,
        layer_types=kinds(24, (2, 6, 10, 14, 18, 21), "full_attention", "conv"),
    ),
    "Kimi-K3": {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "text_config": config(
            "KimiLinearForCausalLM",
            *(93, 7168, 96, 96, 163840),
            intermediate_size=33792,
            moe_intermediate_size=3072,
            routed_expert_hidden_size=3584,
            num_experts=896,
            num_experts_per_token=16,
            num_shared_experts=2,
            first_k_dense_replace=1,
            moe_layer_freq=1,
            kv_lora_rank=512,
            q_lora_rank=1536,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            mla_use_output_gate=True,
            linear_attn_config={
                "full_attn_layers": [*range(4, 93, 4), 93],
                "head_dim": 128,
                "num_heads": 96,
                "short_conv_kernel_size": 4,
            },
        ),
    },
    "Kimi-Linear-48B-A3B": config(
        "KimiLinearForCausalLM",
        *(27, 2304, 32, 32, 163840),
        head_dim=72,
        intermediate_size=9216,
        moe_intermediate_size=1024,
        num_experts=256,
        num_experts_per_token=8,
        num_shared_experts=1,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        linear_attn_config={
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_catalogs_layers_and_parameters(name: str) -> None:
    spec, known = ModelSpec.from_hf_config(CONFIGS[name], "mine"), get_model(name)
    assert spec.stack == known.stack
    assert (spec.params, spec.tie_embeddings) == (known.params, known.tie_embeddings)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("Falcon-H1-7B", 7585519712),
        ("Granite-4.0-H-Tiny", 6939037248),
        ("LFM2-1.2B", 1170340608),
    ],
)
def test_parameters_are_those_of_transformers_own_model(name: str, params: int) -> None:
    """Counted from transformers 5.24.0's modules for the same config."""
    assert get_model(name).params == params


ATTENTION = GroupedQueryAttention(heads=8, kv_heads=2, head_dim=64)
MAMBA = Mamba2(heads=16, head_dim=64, d_state=64)


def test_a_gated_output_of_latent_attention_is_one_matrix_more() -> None:
    plain = get_model("Kimi-K2")
    gated = plain.model_copy(update={"attention": plain.attention.model_copy(update={"output_gate": True})})
    assert gated.params - plain.params == plain.layers * 64 * 128 * plain.hidden
    shape = StepShape.decode(4, 1000)
    more = amounts(gated, shape).keys() - amounts(plain, shape).keys()
    assert {name.split(".")[-1] for name in more} == {"output_gate"}
    assert gated.kv_bytes_per_token(16) == plain.kv_bytes_per_token(16)


def small(*mixers: Any, **changes: Any) -> ModelSpec:
    mixer = mixers[0] if len(mixers) == 1 else ParallelMixers(mixers=mixers)
    given = {"attention": mixer, "ffn": DenseFfn(intermediate=1024), "tie_embeddings": True, "max_context": 4096}
    return ModelSpec(name="small", layers=4, hidden=512, vocab=1000, source="a test", **given | changes)


def amounts(model: ModelSpec, shape: StepShape, setup: EngineSetup = PLAIN) -> dict[str, tuple[float, float]]:
    """FLOPs and bytes of each operator of a step."""
    operators = step_operators(model, setup, shape)
    return {op.name: (float(op.flops) * op.calls, float(op.bytes) * op.calls) for op in operators}


@pytest.mark.parametrize("shape", [StepShape.decode(4, 300), StepShape.prefill(2, 500)])
@pytest.mark.parametrize("tp", [1, 2])
def test_mixers_side_by_side_do_what_each_does_alone(shape: StepShape, tp: int) -> None:
    setup = EngineSetup(parallel=Parallelism(tp=tp))
    both, alone = amounts(small(ATTENTION, MAMBA), shape, setup), amounts(small(ATTENTION), shape, setup)
    assert both == alone | amounts(small(MAMBA), shape, setup)
    assert {"qkv", "attention", "o", "in_proj", "state", "out_proj"} <= set(both)


def test_mixers_side_by_side_keep_what_each_keeps_alone() -> None:
    both, attention, mamba = small(ATTENTION, MAMBA), small(ATTENTION), small(MAMBA)
    assert both.kv_bytes_per_token(16) == attention.kv_bytes_per_token(16) > 0
    assert both.state_bytes_per_sequence == mamba.state_bytes_per_sequence > 0
    assert cache_terms(both, PLAIN) == cache_terms(attention, PLAIN) + cache_terms(mamba, PLAIN)
    assert both.params == attention.params + mamba.params - small(ATTENTION).params + 4 * (
        sum(n * k for _, n, k in ATTENTION.linears(512)) + ATTENTION.vectors(512)
    )
    assert both.mixer_kinds == {"gqa", "mamba2"}


def test_one_mixer_is_not_side_by_side() -> None:
    with pytest.raises(ValueError, match="less than two"):
        ParallelMixers(mixers=(MAMBA,))


def test_a_short_convolution_keeps_its_last_inputs_and_no_state() -> None:
    model = small(ShortConv(channels=512, conv_width=3))
    assert model.kv_bytes_per_token(16) == 0 == model.layers * model.attention.state_elements
    assert model.state_bytes_per_sequence == 4 * 2 * 512 * 2
    flops, moved = amounts(model, StepShape.decode(8, 4000))["state"]
    assert flops == 0 and moved > 2 * 8 * model.state_bytes_per_sequence
    assert amounts(model, StepShape.decode(8, 10)) == amounts(model, StepShape.decode(8, 4000))


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_step_is_no_faster_than_its_weights_pass_memory(name: str, phase: str) -> None:
    point = OperatingPoint(get_model(name), hardware=H100, setup=PLAIN, phase=phase, batch=4, context=2048)  # type: ignore[arg-type]
    read = sum(cost.operator.weight_bytes * cost.operator.calls for cost in point.cost.operators)
    assert point.cost.time_s > float(read) / H100.bandwidth_bytes_per_s > 0
    longer = OperatingPoint(get_model(name), hardware=H100, setup=PLAIN, phase=phase, batch=4, context=8192)  # type: ignore[arg-type]
    assert longer.cost.time_s > point.cost.time_s


@pytest.mark.parametrize(
    "name", [*MIXED, "Gemma-3n-E4B", "Gemma-4-E2B", "LongCat-Flash", "MiniMax-M3", "Step-3", "Kimi-K3"]
)
@pytest.mark.parametrize("phase", ["decode", "prefill", "verify"])
def test_groups_and_operators_add_up_to_the_step(name: str, phase: str) -> None:
    point = OperatingPoint(get_model(name), hardware=H100, setup=PLAIN, phase=phase, batch=4, context=2048)  # type: ignore[arg-type]
    document = point.to_json()
    operators = document["operators"]
    assert len({op["name"] for op in operators}) == len(operators)
    assert sum(op["time_s"] for op in operators) == pytest.approx(document["step"]["time_s"])
    assert sum(group["time_s"] for group in document["groups"]) == pytest.approx(document["step"]["time_s"])


@pytest.mark.parametrize("name", ["Falcon-40B", "DeepSeek-V3"])
def test_a_model_does_not_draft_for_one_whose_tokens_are_others(name: str) -> None:
    families = {get_model(other).tokenizer_family for other in ("Falcon-H1-1.5B", "DeepSeek-OCR")}
    assert get_model(name).tokenizer_family not in families


@pytest.mark.parametrize("name", MIXED)
def test_a_scenario_with_it_is_simulated(name: str) -> None:
    scenario = load_scenario("live-cpu").with_techniques(()).with_value("model", name)
    scenario = scenario.with_value("hardware", "H200").with_value("workload.requests", 8)
    scenario = scenario.with_value(
        "workload.prompts", {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 500}}
    )
    result = run(scenario)
    assert result.requests["completed"].sum() == 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["conv"] * 3}, ["layer_types", "one for each layer"]),
        ({"conv_L_cache": 0}, ["conv_L_cache", "positive"]),
        ({"block_ff_dim": None}, ["block_ff_dim", "missing"]),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_in_one_sentence(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as refusal:
        ModelSpec.from_hf_config(CONFIGS["LFM2-1.2B"] | change, "mine")
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("ibm-granite/granite-4.0-h-small", "Granite-4.0-H-Small"),
        ("ibm-granite/granite-4.0-h-tiny-GGUF:Q4_K_M", "Granite-4.0-H-Tiny"),
        ("granite4:tiny-h", "Granite-4.0-H-Tiny"),
        ("granite4:micro", "Granite-4.0-Micro"),
        ("granite4:32b-a9b-h", "Granite-4.0-H-Small"),
        ("tiiuae/Falcon-H1-34B-Instruct-GPTQ-Int4", "Falcon-H1-34B"),
        ("LiquidAI/LFM2-8B-A1B-GGUF", "LFM2-8B-A1B"),
        ("lfm2.5-thinking:1.2b", "LFM2-1.2B"),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "Kimi-Linear-48B-A3B"),
        ("cyankiwi/Kimi-Linear-48B-A3B-Instruct-AWQ-4bit", "Kimi-Linear-48B-A3B"),
    ],
)
def test_names_of_hubs_and_registries_resolve(name: str, known: str) -> None:
    assert get_model(name) is get_model(known)
