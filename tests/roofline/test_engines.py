"""Profiles of engines: which one a name means, and what their numbers do to a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from membound.roofline.cost import step_cost
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.models import get_model
from membound.roofline.parallel import Parallelism
from membound.roofline.shape import StepShape
from membound.roofline.techniques import EngineSetup
from membound.roofline.times.engines import get_profile, profile_of_engine, profiles
from membound.roofline.times.kernels import KernelTimes

MODEL, H100, PLAIN = get_model("Llama-3.1-8B"), get_hardware("H100-SXM5"), EngineSetup()
KERNELS = get_profile("kernels")


def step_s(shape=None, **changes):
    times = KernelTimes(H100, KERNELS.model_copy(update=changes))
    return float(step_cost(MODEL, PLAIN, times, shape or StepShape.decode(8, 1000)).time_s)


@pytest.mark.parametrize(
    ("engine", "version", "year", "name"),
    [
        ("vLLM", "0.16.0", 2026, "vllm"),
        ("vLLM", "vLLM 0.6.3", 2024, "vllm-0.6"),
        ("vLLM", "0.5.4", 2024, "vllm-0.5"),
        ("vLLM", "vLLM (2023, authors mod)", 2023, "vllm-2023"),
        ("vLLM", "", 2023, "vllm-2023"),
        ("TensorRT-LLM", "1.1.0rc2", 2025, "tensorrt-llm"),
        ("TensorRT-LLM", "0.9.0", 2024, "tensorrt-llm-0"),
        ("lmdeploy-turbomind", "0.2", None, "turbomind"),
        ("AutoAWQ weight-only int4 awq (gemv kernel)", "", None, "autoawq-gemv"),
        ("HF transformers + bitsandbytes", "", None, "transformers"),
        ("somebody's engine", "1.0", 2026, "graphs"),
        ("vLLM 0.11.2", "", None, "vllm-0.13"),
        ("vLLM", "0.14.0", 2026, "vllm"),
        ("vLLM", "", None, "vllm"),
        ("vLLM", "", 2025, "vllm-0.13"),
        ("vLLM", "benchmark v3, 2025-26", 2026, "vllm-0.13"),
        ("vLLM", "0.2.1", 2024, "vllm-2023"),
        ("NVIDIA NIM", "1.8", 2025, "tensorrt-llm"),
        ("trtllm", "", 2025, "tensorrt-llm"),
        ("TGI", "1.1", 2023, "eager"),
        ("text-generation-inference", "3.0", 2025, "graphs"),
        ("DeepSpeed-FastGen (MII)", "0.2", 2024, "graphs"),
        ("llama-cpp-python", "", 2024, "llama.cpp"),
    ],
)
def test_a_tables_engine_has_the_profile_of_its_generation(engine, version, year, name):
    assert profile_of_engine(engine, version, year).name == name


def test_a_scheduler_that_works_ahead_is_the_present_engines_whatever_the_version_but_no_old_one_has_it():
    assert profile_of_engine("vLLM", "0.11.2", asynchronous=True).name == "vllm"
    assert profile_of_engine("vLLM", "", 2025, asynchronous=True).name == "vllm"
    assert profile_of_engine("vLLM", "0.6.3", asynchronous=True).name == "vllm-0.6"


def test_a_run_without_a_server_has_a_profile_of_its_own_where_the_server_costs_each_sequence():
    served, alone = profile_of_engine("TensorRT-LLM", "1.2"), profile_of_engine("TensorRT-LLM", "1.2", offline=True)
    assert (served.name, alone.name) == ("tensorrt-llm", "tensorrt-llm-offline")
    assert alone.sequence_s < served.sequence_s and (alone.gap_s, alone.step_s) == (served.gap_s, served.step_s)
    for version in ("0.6.3", "0.10.0"):
        served, alone = profile_of_engine("vLLM", version), profile_of_engine("vLLM", version, offline=True)
        assert alone.sequence_s < served.sequence_s and (alone.gap_s, alone.step_s) == (served.gap_s, served.step_s)
        assert alone.batching == served.batching
    assert profile_of_engine("TensorRT-LLM", "0.9", offline=True).name == "tensorrt-llm-0"
    assert profile_of_engine("vLLM", "0.16", offline=True).name == "vllm"


def test_an_engine_that_computes_on_the_host_is_refused():
    with pytest.raises(MemboundError, match="engine 'ktransformers' computes a part of the model on the host"):
        profile_of_engine("KTransformers", "0.3")


def test_an_engine_that_was_told_not_to_capture_launches_each_kernel():
    assert not profile_of_engine("vLLM", "0.16.0", eager=True).graphs
    assert profile_of_engine("ExLlamaV2", eager=True).name == "exllama"


def test_every_profile_says_where_it_is_from():
    assert all(len(profile.source) > 10 for profile in profiles().values())
    assert len(profiles()) >= 15


def test_an_unknown_profile_is_one_sentence_with_the_nearest():
    with pytest.raises(MemboundError, match="'vlm' is unknown; did you mean vllm"):
        get_profile("vlm")


@pytest.mark.parametrize(
    "changes",
    [
        {"gap_s": 1e-6},
        {"step_s": 1e-3},
        {"sequence_s": 1e-4},
        {"extra_kernels": 10},
        {"graphs": False, "launch_s": 5e-5},
        {"graphs": False, "launch_s": 5e-5, "extra_kernels": 50},
    ],
)
def test_what_an_engine_adds_makes_a_step_longer(changes):
    assert step_s(**changes) > step_s()


def test_slow_linears_slow_the_experts_that_run_in_their_kernels_alone():
    mixture, prompt = get_model("Mixtral-8x7B"), StepShape.prefill(1, 4000)

    def experts_s(**changes):
        costs = step_cost(mixture, PLAIN, KernelTimes(H100, KERNELS.model_copy(update=changes)), prompt).operators
        return sum(float(cost.total_s) for cost in costs if cost.operator.kind == "moe")

    assert experts_s(rate_share=0.5) == experts_s()
    assert experts_s(rate_share=0.5, experts_as_linears=True) == pytest.approx(2.0 * experts_s(), rel=0.2)


def test_launches_hide_behind_kernels_that_take_longer():
    prompt = StepShape.prefill(4, 2000)
    assert step_s(prompt, graphs=False, launch_s=8e-6) == pytest.approx(step_s(prompt), rel=0.01)
    assert step_s(graphs=False, launch_s=1e-6) == pytest.approx(step_s())


def test_a_kernel_that_starts_early_hides_its_launch_and_no_work():
    early = step_s(gap_s=-5e-6)
    work_s = sum(
        float(op.time.time_s - op.time.overhead_s) * op.operator.calls
        for op in step_cost(MODEL, PLAIN, KernelTimes(H100, KERNELS), StepShape.decode(8, 1000)).operators
    )
    assert work_s < early < step_s()


def test_a_slower_matrix_rate_costs_prompts_and_hardly_single_tokens():
    prompt, token = StepShape.prefill(4, 2000), StepShape.decode(1, 1000)
    assert step_s(prompt, rate_share=0.5) > 1.5 * step_s(prompt)
    assert step_s(token, rate_share=0.5) < 1.05 * step_s(token)


def test_a_rank_launches_its_own_tokens_and_captures_up_to_so_many():
    """Engines capture a rank's batches, whose guesses are rows too: vLLM's limit is of tokens."""
    profile = get_profile("vllm").model_copy(update={"launch_s": 1e-3, "most_graph_tokens": 512})
    times, model = KernelTimes(get_hardware("H100-SXM5"), profile), get_model("Qwen3-30B-A3B")
    setup = replace(EngineSetup(), parallel=Parallelism(dp=8, ep=8))

    def launching(shape):
        cost = step_cost(model, setup, times, shape)
        return float(cost.operators[-1].total_s) > 0.1

    assert not launching(StepShape.decode(8 * 512.0, 100.0)) and launching(StepShape.decode(8 * 513.0, 100.0))
    assert not launching(StepShape.verify(8 * 128.0, 100.0, 3.0)) and launching(StepShape.verify(8 * 128.0, 100.0, 4.0))
