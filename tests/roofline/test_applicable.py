"""What a scenario names either changes something of its model, or is refused."""

import pytest

from membound.roofline.applicable import check_applicable
from membound.roofline.errors import MemboundError
from membound.roofline.models import get_model
from membound.roofline.operating_point import OperatingPoint
from membound.roofline.scenario import load_scenario
from membound.simulator.planning.planner import plan
from membound.simulator.run import run

PLAN = load_scenario("plan-70b").with_values({"sweep": [], "parallel.tp": 1, "workload.requests": 20})
IDLE = [
    ("Llama-3.1-8B", {"expert_loads": [1.0] * 8}, "field 'expert_loads' is about routed experts, and 'Llama-3.1-8B'"),
    ("Llama-3.1-8B", {"expert_skew": 0.5}, "field 'expert_skew' is about routed experts, and 'Llama-3.1-8B'"),
    ("Mamba-2-2.7B", {"techniques": ["kv_quantization"]}, "kv_quantization needs a cache.*'Mamba-2-2.7B'"),
    ("RWKV-7-1.5B", {"techniques": ["kv_eviction"]}, "kv_eviction needs a cache.*'RWKV-7-1.5B'"),
    ("DeepSeek-V2-Lite", {"techniques": ["kv_eviction"]}, r"kv_eviction chooses tokens for each KV head.*\(MLA\)"),
]


@pytest.mark.parametrize(("model", "fields", "sentence"), IDLE)
def test_what_a_model_lacks_is_refused_in_one_sentence_by_a_step_and_by_a_run(model, fields, sentence):
    scenario = PLAN.with_values({"model": model, **fields})
    for asked in (run, lambda one: OperatingPoint.of(one, batch=1, context=128, phase="decode")):
        with pytest.raises(MemboundError, match=sentence) as caught:
            asked(scenario)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["Jamba-v0.1", "gpt-oss-20b", "Qwen3-Next-80B-A3B"])
def test_a_model_that_has_some_of_it_is_not_refused(model):
    techniques = ["kv_quantization", {"name": "kv_eviction", "policy": "streaming"}]
    for fields in ({"techniques": techniques}, {"expert_skew": 0.5}):
        check_applicable(get_model(model), PLAN.with_values({"model": model, **fields}).setup)


def test_a_plan_of_a_recurrent_model_has_8_bits_without_a_cache():
    found = plan(PLAN.with_value("model", "Mamba-2-2.7B"), devices=["H100-SXM5"], precisions=["8bit"], confirm=0)
    assert found.best is not None
    assert [one.name for one in found.best.replica.precision.lossy] == ["w8a8"]
