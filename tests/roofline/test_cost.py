"""The roofline obeys its own laws and meets published figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from membound.roofline.cost import step_cost
from membound.roofline.footprint import Footprint
from membound.roofline.hardware import catalog as devices
from membound.roofline.hardware import get_hardware
from membound.roofline.models import catalog as models
from membound.roofline.models import get_model
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators, step_weight_bytes
from membound.roofline.techniques import EngineSetup, Int8Weights, WeightQuantization, engine_setup
from membound.roofline.tiles import Tiles
from membound.roofline.times.known import times_for

PLAIN = EngineSetup()
INT8 = engine_setup((Int8Weights(),))
LLAMA = get_model("Llama-3.1-8B")
H100 = times_for(get_hardware("H100-SXM5"))

SEQUENCES = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 600), st.integers(1, 5)), min_size=1, max_size=12)


@given(batch=st.integers(1, 200), context=st.integers(1, 4000))
def test_a_decode_shape_is_the_sum_of_its_sequences(batch, context):
    assert StepShape.decode(batch, context) == StepShape.of([(context - 1, 1, 1)] * batch)


@given(batch=st.integers(1, 8), tokens=st.integers(2, 2000))
def test_a_prefill_shape_is_the_sum_of_its_prompts(batch, tokens):
    shape, prompts = StepShape.prefill(batch, tokens), StepShape.of([(0, tokens, 1)] * batch)
    assert shape.columns() == prompts.columns()
    np.testing.assert_allclose(shape.tiles_within(None)[1:], prompts.tiles_within(None)[1:], rtol=1e-12)


@given(parts=SEQUENCES)
def test_attended_pairs_are_those_of_a_causal_mask(parts):
    pairs = sum(cached + i + 1 for cached, new, _ in parts for i in range(new))
    assert StepShape.of(parts).attended == pairs


@given(parts=st.lists(SEQUENCES, min_size=2, max_size=5))
def test_many_steps_cost_in_one_call_what_they_cost_one_by_one(parts):
    shapes = [StepShape.of(part) for part in parts]
    amounts = (np.array([getattr(s, name) for s in shapes]) for name in shapes[0].columns())
    tiles = Tiles(None, *np.array([s.tiles_within(None)[1:] for s in shapes]).T)
    together = replace(StepShape(*amounts), tiles=(tiles,))
    times_s = [float(step_cost(LLAMA, PLAIN, H100, shape).time_s) for shape in shapes]
    np.testing.assert_allclose(step_cost(LLAMA, PLAIN, H100, together).time_s, times_s, rtol=1e-9)


@given(batch=st.integers(1, 300), context=st.integers(2, 8000), more=st.integers(1, 100))
def test_more_work_never_takes_less_time(batch, context, more):
    time_s = step_cost(LLAMA, PLAIN, H100, StepShape.decode(batch, context)).time_s
    assert step_cost(LLAMA, PLAIN, H100, StepShape.decode(batch + more, context)).time_s >= time_s
    assert step_cost(LLAMA, PLAIN, H100, StepShape.decode(batch, context + more)).time_s >= time_s


@given(batch=st.integers(1, 512), context=st.integers(1, 4000))
def test_shares_sum_to_one_and_the_interval_holds_the_time(batch, context):
    cost = step_cost(LLAMA, PLAIN, H100, StepShape.decode(batch, context))
    assert sum(float(share) for share in cost.shares().values()) == pytest.approx(1)
    assert cost.low_s < cost.time_s < cost.high_s


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", ["Llama-3.1-8B", "SmolLM2-135M"])
def test_no_device_is_faster_than_its_memory(device, name):
    model, hardware = get_model(name), get_hardware(device)
    cost = step_cost(model, PLAIN, times_for(hardware), StepShape.decode(1, 100))
    assert cost.time_s > step_weight_bytes(model, PLAIN) / hardware.bandwidth_bytes_per_s


@pytest.mark.parametrize("name", models())
def test_decode_takes_two_flops_a_parameter_and_reads_every_matrix_once(name):
    """Kaplan et al. 2020: forward FLOPs a token = 2 N without embeddings, besides attention's."""
    model = get_model(name)
    operators = step_operators(model, PLAIN, StepShape.decode(1, 1))
    flops = sum(float(op.flops) * op.calls for op in operators if op.kind in ("linear", "moe"))
    tied = model.vocab * model.hidden if model.tie_embeddings else -model.lm_head_bias * model.vocab
    matrices = model.active_params - model.vector_params - model.embedding_params + tied
    assert flops == pytest.approx(2 * matrices, rel=1e-9)
    assert step_weight_bytes(model, PLAIN) == pytest.approx(2 * matrices, rel=1e-9)


def test_eight_bits_halve_the_weights_but_for_the_scales():
    ratio = step_weight_bytes(LLAMA, PLAIN) / step_weight_bytes(LLAMA, INT8)
    assert 1.99 < ratio < 2.0


def test_the_kv_cache_of_llama_takes_128_kib_a_token():
    """Llama-3.1-8B: 2 x 8 heads x 128 x 2 bytes x 32 layers; models.csv of the facts gives 131072."""
    held = Footprint.of(LLAMA, PLAIN)
    assert held.sequence_bytes(1) == 131072
    assert held.weights_bytes == pytest.approx(16.06e9, rel=0.001)


def test_batching_moves_the_bottleneck_and_prefill_computes():
    assert step_cost(LLAMA, PLAIN, H100, StepShape.decode(1, 500)).bottleneck == "memory_weights"
    assert step_cost(LLAMA, PLAIN, H100, StepShape.decode(256, 4000)).bottleneck == "memory_kv"
    assert step_cost(LLAMA, PLAIN, H100, StepShape.prefill(4, 2048)).bottleneck == "compute"


@pytest.mark.parametrize(("batch", "published_ms"), [(1, 6.17), (8, 6.50), (16, 7.07), (64, 9.13), (128, 10.97)])
def test_an_uncalibrated_h100_is_within_its_interval_of_published_decode_times(batch, published_ms):
    """Llama-3.1-8B bf16 on one H100, prompts of 512, outputs of 256: kernels of aiconfigurator (vLLM 0.24), summed."""
    kernels = times_for(get_hardware("H100-SXM5"), "kernels")
    cost = step_cost(LLAMA, PLAIN, kernels, StepShape.decode(batch, 640))
    assert cost.low_s * 1e3 < published_ms < cost.high_s * 1e3


def test_a_step_of_nothing_costs_the_same_alone_and_among_others():
    nothing = StepShape(0.0, 0.0, 0.0, 0.0, 0.0)
    one = step_cost(LLAMA, PLAIN, H100, nothing).time_s
    many = StepShape(*(np.zeros(2) for _ in range(5)))
    np.testing.assert_allclose(step_cost(LLAMA, PLAIN, H100, many).time_s, [one, one], rtol=1e-9)


def test_steps_without_logits_run_no_lm_head_alone_or_among_others():
    """The chunks of a prompt before its last one."""
    chunk, last = replace(StepShape.prefill(1.0, 512.0), logits_rows=0.0), StepShape.prefill(1.0, 512.0, 512.0)
    times_s = [float(step_cost(LLAMA, PLAIN, H100, shape).time_s) for shape in (chunk, last)]
    together = {name: np.array([value, last.columns()[name]]) for name, value in chunk.columns().items()}
    np.testing.assert_allclose(step_cost(LLAMA, PLAIN, H100, StepShape(**together)).time_s, times_s, rtol=1e-9)
    assert "lm_head" not in {operator.name for operator in step_operators(LLAMA, PLAIN, chunk)}


def test_a_step_is_no_surer_than_the_kernels_of_its_time():
    int4, shape = engine_setup((WeightQuantization(format="int4"),)), StepShape.decode(64, 8000)
    costs = {name: step_cost(LLAMA, setup, H100, shape) for name, setup in (("bf16", PLAIN), ("int4", int4))}
    for cost in costs.values():
        spreads = [H100.spread_of(operator.operator) for operator in cost.operators]
        assert H100.relative_error <= cost.relative_error <= max(H100.relative_error, *spreads)
    assert costs["int4"].relative_error >= costs["bf16"].relative_error


def test_of_one_device_and_engine_there_is_one_time_of_anything() -> None:
    hardware, other = get_hardware("H100-SXM5"), get_hardware("A100-SXM4-80GB")
    assert times_for(hardware, "vllm") == times_for(hardware, "vllm")
    assert len({times_for(hardware, "vllm"), times_for(hardware, "sglang"), times_for(other, "vllm")}) == 3
