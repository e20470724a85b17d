"""Do mixtures with shared experts, or with experts that compute nothing, and further dense families read and cost?"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from config_json import config
from hypothesis import given
from hypothesis import strategies as st

from membound.roofline.hardware import get_hardware
from membound.roofline.models import GroupedQueryAttention, ModelSpec, MoeFfn, get_model
from membound.roofline.operating_point import OperatingPoint
from membound.roofline.parallel import Parallelism
from membound.roofline.scenario import load_scenario
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import EngineSetup
from membound.simulator.run import run

PLAIN = EngineSetup()

fields = partial(config, max_position_embeddings=131072)


LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 1536}
CONFIGS = {
    "Ling-lite": fields(
        "BailingMoeForCausalLM",
        *(28, 2048, 16, 4, 126464),
        head_dim=128,
        intermediate_size=5632,
        moe_intermediate_size=1408,
        num_experts=64,
        num_experts_per_tok=6,
        num_shared_experts=2,
        first_k_dense_replace=0,
    ),
    "Ling-mini-2.0": fields(
        "BailingMoeV2ForCausalLM",
        *(20, 2048, 16, 4, 157184),
        head_dim=128,
        intermediate_size=5120,
        moe_intermediate_size=512,
        num_experts=256,
        num_experts_per_tok=8,
        num_shared_experts=1,
        first_k_dense_replace=1,
        use_qk_norm=True,
        moe_router_enable_expert_bias=True,
        n_group=8,
        topk_group=4,
    ),
    "dots.llm1": fields(
        "Dots1ForCausalLM",
        *(62, 4096, 32, 32, 152064),
        intermediate_size=10944,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        sliding_window=None,
    ),
    "Grok-2": fields(
        "Grok1ForCausalLM",
        *(64, 8192, 64, 8, 131072),
        head_dim=128,
        intermediate_size=32768,
        moe_intermediate_size=16384,
        num_local_experts=8,
        num_experts_per_tok=2,
        residual_moe=True,
    ),
    "Snowflake-Arctic": fields(
        "ArcticForCausalLM",
        *(35, 7168, 56, 8, 32000),
        intermediate_size=4864,
        num_local_experts=128,
        num_experts_per_tok=2,
        moe_layer_frequency=1,
        use_residual=True,
    ),
    "LongCat-Flash": fields(
        "LongcatFlashForCausalLM",
        *(28, 6144, 64, 64, 131072),
        **LATENT,
        num_layers=28,
        ffn_hidden_size=12288,
        expert_ffn_hidden_size=2048,
        n_routed_experts=512,
        moe_topk=12,
        zero_expert_num=256,
    ),
    "Step-3": {
        "architectures": ["Step3VLForConditionalGeneration"],
        "text_config": fields(
            "Step3TextForCausalLM",
            *(61, 7168, 64, 1, 128815),
            head_dim=256,
            num_attention_groups=1,
            share_q_dim=2048,
            intermediate_size=18432,
            moe_num_experts=48,
            moe_top_k=3,
            moe_intermediate_size=5120,
            share_expert_dim=5120,
            moe_layers_enum=",".join(map(str, range(4, 60))),
        ),
    },
    "Step-3.5-Flash": fields(
        "Step3p5ForCausalLM",
        *(45, 4096, 64, 8, 128896),
        head_dim=128,
        num_attention_groups=8,
        intermediate_size=11264,
        moe_num_experts=288,
        moe_top_k=8,
        moe_intermediate_size=1280,
        share_expert_dim=1280,
        sliding_window=512,
        attention_other_setting={"num_attention_heads": 96},
    ),
    "MiniMax-M3": fields(
        "MiniMaxM3ForCausalLM",
        *(60, 6144, 64, 4, 200064),
        head_dim=128,
        intermediate_size=3072,
        moe_intermediate_size=3072,
        dense_intermediate_size=12288,
        shared_intermediate_size=3072,
        num_local_experts=128,
        num_experts_per_tok=4,
        moe_layer_freq=[0] * 3 + [1] * 57,
        sparse_attention_config={
            "sparse_attention_freq": [0] * 3 + [1] * 57,
            "sparse_block_size": 128,
            "sparse_index_dim": 128,
            "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16,
        },
    ),
    "A.X-K1": fields(
        "AXK1ForCausalLM",
        *(61, 7168, 64, 64, 163840),
        **LATENT,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        n_routed_experts=192,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=1,
        n_group=8,
        topk_group=4,
    ),
    "Solar-Open-100B": fields(
        "SolarOpenForCausalLM",
        *(48, 4096, 64, 8, 196608),
        head_dim=128,
        intermediate_size=10240,
        moe_intermediate_size=1280,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=8,
    ),
    "Hy3": fields(
        "HYV3ForCausalLM",
        *(80, 4096, 64, 8, 120832),
        head_dim=128,
        intermediate_size=13312,
        moe_intermediate_size=1536,
        num_experts=192,
        num_experts_per_tok=8,
        num_shared_experts=1,
        mlp_layer_types=["dense"] + ["sparse"] * 79,
    ),
    "K-EXAONE-236B-A23B": fields(
        "ExaoneMoeForCausalLM",
        *(48, 6144, 64, 8, 153600),
        head_dim=128,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_experts=128,
        num_experts_per_tok=8,
        num_shared_experts=1,
        first_k_dense_replace=1,
        sliding_window=128,
    ),
    "Trinity-Mini": fields(
        "AfmoeForCausalLM",
        *(32, 2048, 32, 4, 200192),
        head_dim=128,
        intermediate_size=6144,
        moe_intermediate_size=1024,
        num_experts=128,
        num_experts_per_tok=8,
        num_shared_experts=1,
        num_dense_layers=2,
        sliding_window=2048,
    ),
    "Hunyuan-A13B": fields(
        "HunYuanMoEV1ForCausalLM",
        *(32, 4096, 32, 8, 128167),
        head_dim=128,
        intermediate_size=3072,
        moe_intermediate_size=[3072] * 32,
        num_experts=64,
        moe_topk=[8] * 32,
        num_shared_expert=[1] * 32,
        use_mixed_mlp_moe=True,
        use_qk_norm=True,
    ),
    "Hunyuan-7B": fields(
        "HunYuanDenseV1ForCausalLM", *(32, 4096, 32, 8, 128167), intermediate_size=14336, head_dim=128
    ),
    "EXAONE-4.0-1.2B": fields("Exaone4ForCausalLM", *(30, 2048, 32, 8, 102400), intermediate_size=4096, head_dim=64),
    "AFM-4.5B": fields("ArceeForCausalLM", *(36, 2560, 20, 4, 128004), intermediate_size=18432, hidden_act="relu2"),
    "Apertus-8B": fields("ApertusForCausalLM", *(32, 4096, 32, 8, 131072), intermediate_size=21504),
    "ERNIE-4.5-0.3B": fields("Ernie4_5ForCausalLM", *(18, 1024, 16, 2, 103424), intermediate_size=3072, head_dim=128),
    "CWM-32B": fields(
        "CwmForCausalLM",
        *(64, 6144, 48, 8, 128256),
        intermediate_size=21504,
        sliding_window=8192,
        layer_types=["sliding_attention" if index % 4 else "full_attention" for index in range(64)],
    ),
    "Youtu-LLM-2B": fields("YoutuLLMForCausalLM", *(32, 2048, 16, 16, 128256), intermediate_size=6144, **LATENT),
    "Nemotron-Mini-4B": fields(
        "NemotronForCausalLM", *(32, 3072, 24, 8, 256000), intermediate_size=9216, hidden_act="relu2", head_dim=128
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_catalogs_layers_and_parameters(name: str) -> None:
    config, known = CONFIGS[name], get_model(name)
    spec = ModelSpec.from_hf_config(config | {"tie_word_embeddings": known.tie_embeddings}, "mine")
    assert spec.stack == known.stack
    assert spec.params == known.params


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("MiniMax-M3", 426174565632),
        ("Solar-Open-100B", 102651793408),
        ("Hy3", 295033528320),
        ("Youtu-LLM-2B", 1961560064),
        ("CWM-32B", 32581097472),
        ("ERNIE-4.5-0.3B", 360748032),
        ("Trinity-Mini", 26123974400),
        ("dots.llm1", 142774373888),
    ],
)
def test_parameters_are_those_of_transformers_own_model(name: str, params: int) -> None:
    """Counted from the modules of transformers 5.24.0 for the same config, in which a router's bias is no parameter."""
    spec = get_model(name)
    biases = sum(group.count * group.ffn.experts for group in spec.groups() if getattr(group.ffn, "router_bias", False))
    assert spec.params - params in (0, biases)


@pytest.mark.parametrize(
    ("name", "active_b"),
    [
        ("Ling-lite", 2.75),
        ("Ling-mini-2.0", 1.4),
        ("Ling-flash-2.0", 6.1),
        ("Ling-1T", 51),
        ("dots.llm1", 14),
        ("Grok-2", 115),
        ("Snowflake-Arctic", 17),
        ("LongCat-Flash", 27),
        ("Step-3", 38),
        ("Step-3.5-Flash", 11.8),
        ("Solar-Open-100B", 12),
        ("Hy3", 21),
        ("K-EXAONE-236B-A23B", 23),
    ],
)
def test_active_parameters_are_about_those_of_the_model_card(name: str, active_b: float) -> None:
    """Cards round, and some leave the embedding out."""
    assert get_model(name).active_params / 1e9 == pytest.approx(active_b, rel=0.04)


def mixture(zero: int, top_k: int = 8, experts: int = 64) -> ModelSpec:
    ffn = MoeFfn(experts=experts, top_k=top_k, intermediate=256, zero_experts=zero)
    attention = GroupedQueryAttention(heads=8, kv_heads=8, head_dim=64)
    given = {"attention": attention, "ffn": ffn, "tie_embeddings": True, "max_context": 4096, "source": "a test"}
    return ModelSpec(name="small", layers=4, hidden=512, vocab=1000, **given)


def experts_of(model: ModelSpec, tokens: int, ep: int = 1) -> Any:
    setup = EngineSetup(parallel=Parallelism(dp=ep, ep=ep))
    operators = step_operators(model, setup, StepShape.decode(tokens, 100))
    return next(op for op in operators if op.kind == "moe")


@given(tokens=st.integers(1, 512), zero=st.sampled_from([16, 64, 192]), ep=st.sampled_from([1, 2]))
def test_choices_that_compute_nothing_save_their_share(tokens: int, zero: int, ep: int) -> None:
    tokens *= ep
    some, none = experts_of(mixture(zero), tokens, ep), experts_of(mixture(0), tokens, ep)
    # the busiest device's experts are interpolated, which near all of them is off by less than a thousandth
    within = 1.0 if ep == 1 else 1.001
    assert some.flops <= none.flops and some.weight_bytes <= none.weight_bytes * within
    if ep == 1:
        assert some.flops == pytest.approx(none.flops * 64 / (64 + zero))


def test_half_of_all_choices_on_experts_that_compute_nothing_are_as_half_the_choices() -> None:
    for tokens in (1, 7, 300):
        half, fewer = experts_of(mixture(64, top_k=8), tokens), experts_of(mixture(0, top_k=4), tokens)
        assert (half.flops, half.weight_bytes) == (pytest.approx(fewer.flops), pytest.approx(fewer.weight_bytes))
    assert mixture(64).params - mixture(0).params == 4 * 64 * 512  # rows of the router
    assert mixture(64).active_params - 4 * 64 * 512 == mixture(0, top_k=4).active_params


def test_experts_that_choose_tokens_compute_all_of_them() -> None:
    with pytest.raises(ValueError, match="zero_experts"):
        MoeFfn(experts=8, top_k=2, intermediate=64, zero_experts=4, choice="expert")


def test_a_narrow_projection_of_q_saves_its_matrix_and_leaves_the_cache() -> None:
    wide = GroupedQueryAttention(heads=64, kv_heads=1, head_dim=256)
    narrow = GroupedQueryAttention(heads=64, kv_heads=1, head_dim=256, q_lora_rank=2048)
    assert narrow.kv_elements_per_token == wide.kv_elements_per_token == 512

    def size(attention: GroupedQueryAttention, tp: int = 1) -> int:
        return sum(n * k for _, n, k in attention.linears(7168, tp))

    assert size(wide) - size(narrow) == 64 * 256 * 7168 - 2048 * (7168 + 64 * 256)
    assert size(narrow) < size(narrow, 8) * 8  # what is not divided is on each device
    operators = step_operators(get_model("Step-3"), PLAIN, StepShape.decode(4, 1000))
    assert sum(float(op.weight_bytes) * op.calls for op in operators if op.name.endswith((".qkv", ".q_b", ".o"))) == (
        2 * 61 * size(narrow)
    )


def test_chosen_tokens_bound_what_is_read_and_not_what_is_kept() -> None:
    sparse = get_model("MiniMax-M3")
    dense = sparse.model_copy(
        update={"attention": sparse.usual_attention.model_copy(update={"indexer": None}), "overrides": ()}
    )
    sparse = sparse.model_copy(update={"overrides": ()})

    def read(model: ModelSpec, context: int, name: str) -> float:
        operators = step_operators(model, PLAIN, StepShape.decode(2, context))
        return sum(float(op.kv_bytes) * op.calls for op in operators if op.name.endswith(name))

    assert read(sparse, 1500, "attention") == read(dense, 1500, "attention")
    assert read(sparse, 100_000, "attention") == read(sparse, 3000, "attention") < read(dense, 3000, "attention")
    assert read(sparse, 100_000, "index") == 60 * 2 * 100_000 * 256 > 0 == read(dense, 100_000, "index")
    assert sparse.kv_bytes_per_token(16) == dense.kv_bytes_per_token(16) + 60 * 256


@pytest.mark.parametrize("name", ["MiniMax-M3", "LongCat-Flash", "Step-3", "Ling-mini-2.0", "Grok-2", "Youtu-LLM-2B"])
def test_it_is_predicted_and_simulated(name: str) -> None:
    scenario = load_scenario("live-cpu").with_techniques(()).with_value("model", name).with_value("hardware", "B200")
    tp = 1 if get_model(name).params < 50e9 else 16
    scenario = scenario.with_value("parallel", {"tp": tp})
    scenario = scenario.with_value("workload.requests", 8)
    scenario = scenario.with_value(
        "workload.prompts", {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 500}}
    )
    assert run(scenario).requests["completed"].sum() == 8
    hardware = get_hardware("B200")
    point = OperatingPoint(
        get_model(name), hardware=hardware, setup=scenario.setup, phase="decode", batch=4, context=2048
    )
    read = sum(cost.operator.weight_bytes * cost.operator.calls for cost in point.cost.operators)
    assert point.cost.time_s > float(read) / hardware.bandwidth_bytes_per_s > 0


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("inclusionAI/Ling-mini-2.0", "Ling-mini-2.0"),
        ("inclusionAI/Ring-1T-FP8", "Ling-1T"),
        ("rednote-hilab/dots.llm1.inst-GGUF", "dots.llm1"),
        ("stepfun-ai/step3-fp8", "Step-3"),
        ("stepfun-ai/Step-3.5-Flash-FP8", "Step-3.5-Flash"),
        ("meituan-longcat/LongCat-Flash-Chat-FP8", "LongCat-Flash-560B-A27B"),
        ("xai-org/grok-2", "Grok-2"),
        ("Snowflake/snowflake-arctic-instruct", "Snowflake-Arctic"),
        ("nvidia/Nemotron-Mini-4B-Instruct", "Minitron-4B"),
        ("nemotron-mini:4b", "Minitron-4B"),
        ("granite3.1-moe:3b", "Granite-3.1-3B-A800M"),
        ("upstage/Solar-Open-100B", "Solar-Open-100B"),
        ("tencent/Hy3-preview", "Hunyuan-3-295B-A21B"),
    ],
)
def test_names_of_hubs_and_registries_resolve(name: str, known: str) -> None:
    assert get_model(name) is get_model(known)
