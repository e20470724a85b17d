"""What does it cost to choose the tokens that sparse attention reads?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membound.roofline.cost import step_cost
from membound.roofline.hardware import get_hardware
from membound.roofline.models import ModelSpec, get_model
from membound.roofline.operators import Operator
from membound.roofline.parallel import Parallelism
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import EngineSetup
from membound.roofline.times.kernels import KernelTimes

PLAIN = EngineSetup()
SPARSE = ("DeepSeek-V3.2", "GLM-5.2")
sparse = st.sampled_from(SPARSE)
H200 = KernelTimes(get_hardware("H200-SXM"))


def indexing(model: ModelSpec, shape: StepShape, tp: int = 1) -> list[Operator]:
    setup = replace(PLAIN, parallel=Parallelism(tp=tp))
    return [op for op in step_operators(model, setup, shape, 2.0) if op.heads is not None and op.heads.scores_only]


@given(name=sparse, batch=st.integers(1, 64), context=st.integers(1, 128_000), tp=st.sampled_from((1, 8)))
@settings(max_examples=40)
def test_decode_reads_an_index_key_of_every_token_on_every_device(name, batch, context, tp):
    """The key is d bytes and an fp32 scale in each layer that chooses: what the cache holds of it."""
    model = get_model(name)
    read = sum(float(op.kv_bytes) * op.calls for op in indexing(model, StepShape.decode(batch, context), tp))
    assert read == pytest.approx(model.index_bytes_per_token * batch * context)


@given(name=sparse, new=st.integers(1, 20_000), cached=st.integers(0, 20_000))
@settings(max_examples=40)
def test_prompts_score_all_causal_pairs(name, new, cached):
    model, pairs = get_model(name), new * cached + new * (new + 1) / 2
    chooses = [(group.count, group.attention.indexer) for group in model.groups()]
    each = sum(count * 2 * one.heads * one.head_dim for count, one in chooses if not one.shared)
    scored = sum(float(op.flops) * op.calls for op in indexing(model, StepShape.prefill(1.0, new, cached)))
    assert scored == pytest.approx(each * pairs)


def test_layers_that_share_a_choice_score_nothing():
    layers = [group.count for group in get_model("GLM-5.2").groups() if not group.attention.indexer.shared]
    assert [op.calls for op in indexing(get_model("GLM-5.2"), StepShape.decode(1.0, 5000.0))] == layers
    assert sum(layers) < get_model("GLM-5.2").layers


@pytest.mark.parametrize("name", SPARSE)
def test_time_grows_with_the_context_beyond_the_chosen_tokens(name):
    """By what is read of the new keys at the data sheet's bandwidth, or more."""
    model = get_model(name)
    contexts = np.array([4_096.0, 32_768.0, 131_072.0])
    seconds = step_cost(model, PLAIN, H200, StepShape.decode(32.0, contexts)).time_s
    keys_s = 32.0 * np.diff(contexts) * model.index_bytes_per_token / H200.hardware.bandwidth_bytes_per_s
    assert np.all(np.diff(seconds) >= keys_s)


def test_a_long_context_costs_less_than_without_choosing():
    """What DeepSeek-V3.2 is for (its report of 2025, figure of the costs by position, from memory): it is cheaper than
    V3.1, which is the same but for the choice."""
    chosen, whole = get_model("DeepSeek-V3.2"), get_model("DeepSeek-V3")
    for shape in (StepShape.decode(32.0, 128_000.0), StepShape.prefill(1.0, 4096.0, 120_000.0)):
        assert step_cost(chosen, PLAIN, H200, shape).time_s < step_cost(whole, PLAIN, H200, shape).time_s
