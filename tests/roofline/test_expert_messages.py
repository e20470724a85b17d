"""What do devices that share a mixture's experts send each other?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from membound.roofline.cost import step_cost
from membound.roofline.hardware import get_hardware
from membound.roofline.models import MoeFfn, get_model
from membound.roofline.operators import Operator
from membound.roofline.parallel import Parallelism
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import EngineSetup
from membound.roofline.times.kernels import KernelTimes

PLAIN = EngineSetup()
DEEPSEEK, QWEN = get_model("DeepSeek-V3"), get_model("Qwen3-30B-A3B")  # with a shared expert and without
H200 = KernelTimes(get_hardware("H200-SXM"))
OF_EXPERTS = ("gather_tokens", "dispatch", "combine", "scatter_outputs", "reduce_experts", "gather_experts")
models = st.sampled_from((DEEPSEEK, QWEN))
powers = st.sampled_from((1, 2, 4, 8))


def sent(model, shape: StepShape, *names: str, **degrees: int) -> dict[str, Operator]:
    setup = replace(PLAIN, parallel=Parallelism(**degrees))
    ops = step_operators(model, setup, shape, 2.0)
    return {name: op for op in ops if (name := op.name.rsplit(".", 1)[-1]) in (names or OF_EXPERTS)}


def link_bytes(ops: dict[str, Operator]) -> float:
    return sum(float(op.link_bytes) for op in ops.values())


@given(model=models, dp=st.integers(2, 16), batch=st.integers(16, 500), prompts=st.booleans())
@settings(max_examples=40)
def test_devices_that_share_experts_gather_tokens_and_scatter_outputs(model, dp, batch, prompts):
    """With ep 1 each computes its columns for the tokens of all: it gets those of the others, and sends sums back."""
    shape = StepShape.prefill(float(batch), 100.0) if prompts else StepShape.decode(float(batch), 1000.0)
    ops = sent(model, shape, dp=dp, ep=1)
    assert set(ops) == {"gather_tokens", "scatter_outputs"}
    of_a_rank = -(-batch // dp) * (100 if prompts else 1)  # sequences are whole, and all wait for the rank with most
    assert link_bytes(ops) == pytest.approx((dp - 1) * of_a_rank * model.hidden * (2 + 2))


@given(model=models, dp=powers, batch=st.integers(1, 4000), prompts=st.booleans())
@settings(max_examples=40)
def test_experts_apart_never_take_more_messages_than_experts_in_columns(model, dp, batch, prompts):
    """No device needs a token more than once, so that all to all devices is the most that is sent."""
    assume(dp > 1)
    shape = StepShape.prefill(float(batch), 100.0) if prompts else StepShape.decode(float(batch), 1000.0)
    together, apart = sent(model, shape, dp=dp, ep=1), sent(model, shape, dp=dp, ep=dp)
    assert link_bytes(apart) <= link_bytes(together) * (1 + 1e-9)


@given(tp=powers, dp=powers, prompts=st.booleans(), tokens=st.integers(64, 10_000))
@settings(max_examples=40)
def test_what_goes_to_experts_does_not_depend_on_how_attention_is_divided(tp, dp, prompts, tokens):
    """Devices of tp have the same tokens, of which each sends its share."""
    assume(dp > 1)
    shape = StepShape.prefill(1.0, float(tokens)) if prompts else StepShape.decode(float(tokens), 500.0)
    names = ("dispatch", "combine")
    divided = sent(DEEPSEEK, shape, *names, tp=tp, dp=dp, ep=tp * dp)
    copied = sent(DEEPSEEK, shape, *names, dp=tp * dp, ep=tp * dp)
    assert link_bytes(divided) == pytest.approx(link_bytes(copied))


@given(tp=st.sampled_from((2, 4, 8)), dp=powers, ep=powers, batch=st.integers(8, 500))
@settings(max_examples=40)
def test_shared_experts_are_summed_over_the_devices_that_have_their_columns(tp, dp, ep, batch):
    assume((tp * dp) % ep == 0)
    shape = StepShape.decode(float(batch), 1000.0)
    summed = sent(DEEPSEEK, shape, "reduce_experts", tp=tp, dp=dp, ep=ep)
    of_a_rank = -(-batch // dp)
    assert link_bytes(summed) == pytest.approx(2 * (tp - 1) / tp * of_a_rank * DEEPSEEK.hidden * 2)
    without = sent(QWEN, shape, "reduce_experts", "gather_experts", tp=tp, dp=dp, ep=ep)
    whole = ep == tp * dp and dp > 1  # each device has whole outputs of its share of the tokens
    passes = 1 if whole else 2
    assert link_bytes(without) == pytest.approx(passes * (tp - 1) / tp * of_a_rank * QWEN.hidden * 2)


DIVISIONS = [
    (tp, dp, ep) for tp in (1, 2, 4) for dp in range(2, 7) for ep in (1, 2, 4, 8, 16) if (tp * dp) % ep == 0
]  # ep divides dp, is divided by it, or neither


@given(degrees=st.sampled_from(DIVISIONS), tokens=st.integers(1, 500))
@settings(max_examples=60)
def test_every_token_reaches_its_experts_whatever_the_degrees(degrees, tokens):
    """A device gets at least the tokens for its experts that it has not, once each, and at most all."""
    tp, dp, ep = degrees
    shape, ffn = StepShape.prefill(float(dp), float(tokens)), QWEN.groups()[0].ffn  # a prompt for each rank
    assert isinstance(ffn, MoeFfn)
    got = link_bytes(sent(QWEN, shape, "gather_tokens", "dispatch", tp=tp, dp=dp, ep=ep)) / (2 * QWEN.hidden)
    elsewhere = tokens * (dp - 1.0)
    asked = 1 - (1 - 1 / ep) ** ffn.top_k  # the chance that one of k experts is on a device
    # those of tp that have the tokens already pass each other shares of them at last
    assert got >= elsewhere * asked / tp * (1 - 1e-9)
    assert got <= (elsewhere + dp * tokens) * (1 + 1e-9)


@pytest.mark.parametrize(("model", "ep"), [(DEEPSEEK, 2), (DEEPSEEK, 8), (DEEPSEEK, 32), (QWEN, 4), (QWEN, 16)])
def test_devices_with_several_experts_of_a_token_get_it_once_in_prompts(model, ep):
    """Against random choices in the groups that the router takes, with so many tokens that all devices get as many."""
    ffn = next(group.ffn for group in model.groups() if isinstance(group.ffn, MoeFfn))
    random = np.random.default_rng(0)
    group_of = np.arange(ffn.experts) // (ffn.experts // ffn.groups)
    taken = np.argsort(np.argsort(random.random((4000, ffn.groups)), axis=1), axis=1)[:, group_of] < ffn.groups_taken
    liked = np.where(taken, random.random((4000, ffn.experts)), 2.0)
    chosen = np.argsort(liked, axis=1)[:, : ffn.top_k] // (ffn.experts // ep)
    devices = np.mean([len(set(row)) for row in chosen.tolist()])
    tokens = 1e7
    ops = sent(model, StepShape.prefill(tokens, 1.0), "dispatch", dp=ep, ep=ep)
    assert link_bytes(ops) / (tokens / ep * model.hidden * 2) == pytest.approx((ep - 1) / ep * devices, rel=0.04)
    decoding = sent(model, StepShape.decode(tokens, 10.0), "dispatch", dp=ep, ep=ep)
    copies = min(ffn.top_k, ep)
    assert link_bytes(decoding) / (tokens / ep * model.hidden * 2) == pytest.approx((ep - 1) / ep * copies, rel=0.02)


def test_data_parallel_experts_in_columns_are_no_longer_free():
    """DeepSeek-V3 on 8 H200: attention copied, experts cut in columns; messages take what they pass at least."""
    for shape in (StepShape.decode(512.0, 2000.0), StepShape.prefill(8.0, 2048.0)):
        setup = replace(PLAIN, parallel=Parallelism(dp=8, ep=1))
        cost = step_cost(DEEPSEEK, setup, H200, shape)
        talking = sum(float(one.total_s) for one in cost.operators if one.operator.collective)
        passed = sum(float(one.operator.link_bytes) * one.operator.calls for one in cost.operators)
        assert passed > 0
        assert talking >= passed / H200.hardware.scale_up.bandwidth_bytes_per_s
