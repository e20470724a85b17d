"""What do devices that share a context compute, hold and send each other?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membound.roofline.cost import step_cost
from membound.roofline.hardware import get_hardware
from membound.roofline.memory import activation_terms, cache_terms
from membound.roofline.models import get_model
from membound.roofline.operators import Operator
from membound.roofline.parallel import Parallelism
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import EngineSetup, KvEviction, engine_setup
from membound.roofline.times.kernels import KernelTimes

PLAIN = EngineSetup()
H200 = KernelTimes(get_hardware("H200-SXM"))
DENSE = ("Llama-3.1-8B", "Gemma-3-27B", "GPT-J-6B")
LATENT = ("DeepSeek-V2-Lite", "DeepSeek-V3", "DeepSeek-V3.2")
RECURRENT = ("Mamba-2-2.7B", "RWKV-7-1.5B", "Jamba-v0.1", "Qwen3-Next-80B-A3B")
degrees = st.sampled_from((2, 4, 8))


def operators(name: str, shape: StepShape, setup: EngineSetup = PLAIN, **degree: int) -> tuple[Operator, ...]:
    return step_operators(get_model(name), replace(setup, parallel=Parallelism(**degree)), shape, 2.0)


def total(ops: tuple[Operator, ...], amount: str, *kinds: str) -> float:
    return sum(float(getattr(op, amount)) * op.calls for op in ops if op.kind in kinds and op.name != "lm_head")


def sent(ops: tuple[Operator, ...], name: str) -> float:
    return sum(float(op.link_bytes) * op.calls for op in ops if op.name.endswith(name))


@given(name=st.sampled_from(DENSE), cp=degrees, prompt=st.integers(8, 50_000), cached=st.integers(0, 5000))
@settings(max_examples=40)
def test_of_a_prompt_each_device_computes_its_part(name, cp, prompt, cached):
    shape = StepShape.prefill(2.0, float(prompt), float(cached))
    one, part = operators(name, shape), operators(name, shape, cp=cp)
    for kind in ("linear", "attention"):
        assert cp * total(part, "flops", kind) == pytest.approx(total(one, "flops", kind))
    # every weight and every key is read by each of them
    assert total(part, "weight_bytes", "linear") == total(one, "weight_bytes", "linear")
    assert total(part, "kv_bytes", "attention") == pytest.approx(total(one, "kv_bytes", "attention"))


@given(name=st.sampled_from(DENSE + LATENT), cp=degrees, batch=st.integers(1, 64), context=st.integers(64, 100_000))
@settings(max_examples=40)
def test_in_decode_each_device_reads_its_part_of_the_cache_and_all_pass_the_linears(name, cp, batch, context):
    shape = StepShape.decode(float(batch), float(context))
    one, part = operators(name, shape), operators(name, shape, cp=cp)
    assert cp * total(part, "kv_bytes", "attention") == pytest.approx(total(one, "kv_bytes", "attention"))
    assert cp * total(part, "flops", "attention") == pytest.approx(total(one, "flops", "attention"))
    assert total(part, "flops", "linear") == pytest.approx(total(one, "flops", "linear"))


@given(name=st.sampled_from(DENSE + LATENT), cp=degrees, new=st.integers(1, 9000), cached=st.integers(0, 9000))
@settings(max_examples=40)
def test_a_shared_context_is_paid_with_messages(name, cp, new, cached):
    """A ring passes (cp - 1) / cp of what it gathers, and twice as much of what it sums."""
    model, share = get_model(name), (cp - 1) / cp
    prompts = operators(name, StepShape.prefill(1.0, float(new), float(cached)), cp=cp)
    if all(group.attention.window is None for group in model.groups()):
        held = cache_terms(model, PLAIN).bytes(float(new + cached))
        assert sent(prompts, "gather_keys") == pytest.approx(share * held)
    decoding = operators(name, StepShape.decode(3.0, float(new + cached)), cp=cp)
    least = sum(group.count * group.attention.heads * 2.0 for group in model.groups())  # an element of each head
    assert sent(decoding, "reduce_context") > 2 * share * 3.0 * least
    assert sent(prompts, "reduce_context") == 0 == sent(decoding, "gather_keys")


def test_a_cache_that_is_shared_is_read_sooner_and_not_for_nothing():
    """DeepSeek at long contexts: cp 8 is sooner than one device, and later than an eighth of its attention."""
    model, shape = get_model("DeepSeek-V3"), StepShape.decode(64.0, 100_000.0)
    whole = step_cost(model, PLAIN, H200, shape)
    shared = step_cost(model, replace(PLAIN, parallel=Parallelism(cp=8)), H200, shape)
    attention_s = sum(float(one.total_s) for one in whole.operators if one.operator.kind == "attention")
    assert whole.time_s - attention_s * 7 / 8 < shared.time_s < whole.time_s


@given(name=st.sampled_from(RECURRENT), cp=degrees, batch=st.integers(1, 32))
@settings(max_examples=20)
def test_states_are_whole_on_every_device(name, cp, batch):
    model, setup = get_model(name), replace(PLAIN, parallel=Parallelism(cp=cp))
    assert cache_terms(model, setup).state_bytes == cache_terms(model, PLAIN).state_bytes > 0
    shape = StepShape.decode(float(batch), 500.0)
    assert total(operators(name, shape, cp=cp), "kv_bytes", "recurrent") == pytest.approx(
        total(operators(name, shape), "kv_bytes", "recurrent")
    )
    prompt = operators(name, StepShape.prefill(float(batch), 1000.0), cp=cp)
    assert sent(prompt, "gather_states") == pytest.approx((cp - 1) * batch * cache_terms(model, PLAIN).state_bytes)


@given(cp=degrees, tokens=st.integers(1, 100_000))
def test_tokens_and_activations_of_a_prompt_are_divided(cp, tokens):
    model, setup = get_model("Llama-3.1-8B"), replace(PLAIN, parallel=Parallelism(cp=cp))
    assert cp * cache_terms(model, setup).bytes(float(tokens)) == pytest.approx(cache_terms(model, PLAIN).bytes(tokens))
    one, part = activation_terms(model, PLAIN, 2.0), activation_terms(model, setup, 2.0)
    assert cp * part.token_bytes == pytest.approx(one.token_bytes)


def test_choosing_what_to_keep_looks_at_a_part_of_the_keys():
    chosen = engine_setup((KvEviction(policy="snapkv", budget=1024),))
    shape = StepShape.prefill(1.0, 40_000.0)
    one, part = operators("Llama-3.1-8B", shape, chosen), operators("Llama-3.1-8B", shape, chosen, cp=4)
    assert total(part, "flops", "attention") < total(one, "flops", "attention")


def test_many_steps_at_once_are_those_of_each():
    setup = replace(PLAIN, parallel=Parallelism(cp=4, tp=2))
    steps = [StepShape.decode(8.0, 3000.0), StepShape.prefill(2.0, 800.0), StepShape.decode(3.0, 900.0)]
    steps.append(steps[1] + steps[2])
    together = StepShape(*np.array([list(step.columns().values()) for step in steps]).T)
    for name in ("Llama-3.1-8B", "DeepSeek-V3.2", "Jamba-v0.1"):
        model = get_model(name)
        alone = [float(step_cost(model, setup, H200, step).time_s) for step in steps]
        assert step_cost(model, setup, H200, together).time_s == pytest.approx(alone, rel=0.01)
