"""Micro-batches of a pipeline: latency, throughput and bubbles."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membound.roofline.cost import StepCost, micro_batch, pipelined_cost, step_cost
from membound.roofline.hardware import get_hardware
from membound.roofline.models import get_model
from membound.roofline.operating_point import OperatingPoint
from membound.roofline.parallel import Parallelism
from membound.roofline.scenario import parse_scenario
from membound.roofline.serving import Deployment
from membound.roofline.shape import StepShape
from membound.roofline.stages import slowest_stage
from membound.roofline.techniques import EngineSetup
from membound.roofline.times.known import times_for

H100 = get_hardware("H100-SXM5")
TIMES = times_for(H100)
LLAMA = get_model("Llama-3.1-70B")


def setup_of(pp: int, micro_batches: int | None = None, tp: int = 2) -> EngineSetup:
    return replace(EngineSetup(), parallel=Parallelism(tp=tp, pp=pp, micro_batches=micro_batches))


def seconds(batch: float, pp: int, micro_batches: int | None = None) -> float:
    shape = StepShape.decode(batch, 1000.0)
    return float(pipelined_cost(LLAMA, setup_of(pp, micro_batches), TIMES, shape).time_s)


def turns_s(cost: StepCost, pp: int) -> float:
    """As many turns of the last stage as there are stages, which has the vocabulary's matrix beside its layers."""
    head = sum(float(item.total_s) for item in cost.operators if item.operator.name in ("lm_head", "gather_logits"))
    return float(cost.time_s) + (pp - 1) * head


def test_one_micro_batch_passes_all_stages_alone():
    for pp in (2, 4):
        whole = float(step_cost(LLAMA, setup_of(pp), TIMES, StepShape.decode(64.0, 1000.0)).time_s)
        assert seconds(64.0, pp, 1) == pytest.approx(whole)


@given(batch=st.integers(1, 512), pp=st.sampled_from((2, 4, 8)), micro=st.integers(1, 16))
@settings(max_examples=60, deadline=None)
def test_a_round_takes_a_pass_of_one_micro_batch_or_its_turns_on_a_stage(batch, pp, micro):
    made = min(micro, batch)
    one = step_cost(LLAMA, setup_of(pp), TIMES, StepShape.decode(batch / made, 1000.0))
    expected = turns_s(one, pp) * made / pp if made >= pp else float(one.time_s)
    assert seconds(float(batch), pp, micro) == pytest.approx(expected)


@given(batch=st.integers(1, 1024), pp=st.sampled_from((2, 4, 8)))
@settings(max_examples=60, deadline=None)
def test_micro_batches_slow_a_step_down_only_by_the_slowest_stage_and_gain_at_most_the_stages(batch, pp):
    alone, filled = seconds(float(batch), pp, 1), seconds(float(batch), pp)
    whole = step_cost(LLAMA, setup_of(pp), TIMES, StepShape.decode(float(batch), 1000.0))
    assert filled <= turns_s(whole, pp) * (1 + 1e-9)
    assert alone <= pp * filled * (1 + 1e-6)


def test_where_computing_binds_a_full_pipeline_is_as_many_times_as_fast_as_it_has_stages():
    """Steps of thousands of tokens: a micro-batch takes a share of the time, but for launches and messages."""
    shape = StepShape.prefill(32.0, 2048.0)
    alone, filled = (float(pipelined_cost(LLAMA, setup_of(4, micro), TIMES, shape).time_s) for micro in (1, None))
    assert 3.5 < alone / filled <= 4.0


def test_a_single_sequence_gains_nothing_from_stages():
    assert seconds(1.0, 4) == pytest.approx(seconds(1.0, 4, 1))


def test_many_steps_at_once_equal_each_alone():
    batch = np.array([1.0, 2.0, 3.0, 64.0, 500.0])
    for micro in (None, 1, 16):
        together = pipelined_cost(LLAMA, setup_of(4, micro), TIMES, StepShape.decode(batch, 1000.0)).time_s
        np.testing.assert_allclose(together, [seconds(float(one), 4, micro) for one in batch], rtol=1e-9)


def test_a_deployment_decodes_as_a_step_says():
    for micro in (None, 1, 2, 16):
        deployment = Deployment(LLAMA, H100, setup_of(4, micro))
        for batch in (1.0, 3.0, 64.0):
            assert deployment.decode_s(batch, 1000.0) == pytest.approx(seconds(batch, 4, micro))


def test_predict_says_how_many_are_under_way_and_how_long_stages_wait():
    document = {
        "name": "stages", "model": "Llama-3.1-70B", "hardware": "H100-SXM5", "parallel": {"tp": 2, "pp": 4},
        "workload": {"arrivals": {"kind": "closed_loop", "concurrency": 64}, "requests": 64, "task": "chat"},
    }  # fmt: skip
    scenario = parse_scenario(document)
    few, many = (OperatingPoint.of(scenario, batch=batch, context=1000, phase="decode") for batch in (2, 64))
    assert few.to_json()["pipeline"] == {"micro_batches": 2.0, "bubble": 0.5}
    assert many.to_json()["pipeline"] == {"micro_batches": 4.0, "bubble": 0.0}
    assert many.time_s == pytest.approx(seconds(64.0, 4))
    assert many.tokens_per_s == pytest.approx(64 / seconds(64.0, 4))


def test_micro_batches_without_stages_are_refused():
    with pytest.raises(ValueError, match="micro_batches is 4, but pp is 1"):
        Parallelism(micro_batches=4)


def test_a_prompt_is_in_one_micro_batch_and_the_others_wait_for_it():
    """Sarathi-Serve (OSDI 2024, section 3.3): bubbles of uneven micro-batches."""
    decoding = StepShape.decode(64.0, 1000.0)
    for prompts, fullest in ((1.0, 1.0), (2.0, 1.0), (4.0, 1.0), (5.0, 2.0), (8.0, 2.0)):
        shape = decoding + StepShape.prefill(prompts, 1500.0)
        largest = decoding.divided(4.0) + StepShape.prefill(fullest, 1500.0)
        found = float(pipelined_cost(LLAMA, setup_of(4), TIMES, shape).time_s)
        assert found == pytest.approx(turns_s(step_cost(LLAMA, setup_of(4), TIMES, largest), 4), rel=5e-3)


@given(layers=st.integers(8, 130), pp=st.sampled_from((2, 4, 8)), head_s=st.floats(0.0, 20.0), micro=st.integers(1, 16))
@settings(max_examples=80, deadline=None)
def test_a_full_pipeline_moves_at_the_pace_of_its_slowest_stage(layers, pp, head_s, micro):
    """By hand: the first stages have one layer more where they do not divide, the last one has the head."""

    class Cost(NamedTuple):
        operator: SimpleNamespace
        total_s: float

    costs = [Cost(SimpleNamespace(name=name), s) for name, s in (("mlp", float(layers)), ("lm_head", head_s))]
    weights = slowest_stage(costs, layers, Parallelism(pp=pp), micro)
    spent = sum(weight * cost.total_s for weight, cost in zip(weights, costs, strict=True))
    least, more = divmod(layers, pp)
    if micro < pp:
        assert spent == pytest.approx(layers + head_s)
        return
    assert spent == pytest.approx(pp * max(least + head_s, least + 1.0 if more else 0.0))


def test_equal_stages_take_what_one_device_would():
    costs = [
        SimpleNamespace(operator=SimpleNamespace(name=name), total_s=s) for name, s in (("mlp", 8.0), ("host", 1.0))
    ]
    assert slowest_stage(costs, 8, Parallelism(pp=4), 4) == [1.0, 1.0]
    assert slowest_stage(costs, 8, Parallelism(), 4) is None


def test_prompts_of_many_steps_at_once_equal_each_alone():
    prompts = np.array([0.0, 1.0, 3.0, 9.0])
    shapes = [StepShape.decode(32.0, 500.0) + StepShape.prefill(one, 700.0) for one in prompts]
    together = StepShape(*(np.array([getattr(one, name) for one in shapes]) for name in shapes[0].columns()))
    found = pipelined_cost(LLAMA, setup_of(4), TIMES, together).time_s
    alone = [float(pipelined_cost(LLAMA, setup_of(4), TIMES, one).time_s) for one in shapes]
    np.testing.assert_allclose(found, alone, rtol=1e-9)


def test_degrees_are_numbers_and_make_the_same_devices():
    divided = Parallelism(tp=2, pp=4, dp=1, ep=2, micro_batches=8)
    assert divided.degrees() == {"tp": 2, "pp": 4, "dp": 1, "ep": 2, "cp": 1}
    assert Parallelism(**divided.degrees()).devices == divided.devices


def test_of_fewer_sequences_than_fill_all_micro_batches_the_first_has_one_on_each_rank():
    """Five on four ranks are a micro-batch of four and one of one, not two of two and a half."""
    parallel = Parallelism(dp=4, pp=2, ep=4)
    parts = [float(micro_batch(parallel, StepShape.decode(float(n), 40.0))[0].sequences) for n in (3, 4, 5, 8, 20)]
    assert parts == [3.0, 4.0, 4.0, 4.0, 10.0]
