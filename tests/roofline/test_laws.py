"""The laws that every prediction obeys, whatever the model, the device and the engine."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from membound.roofline.chosen_experts import distinct_experts
from membound.roofline.cost import pipelined_cost, step_cost
from membound.roofline.divisible import check_parallel
from membound.roofline.errors import MemboundError
from membound.roofline.grid import decode_grid
from membound.roofline.hardware import HardwareSpec, get_hardware
from membound.roofline.hardware import catalog as devices
from membound.roofline.memory import kv_bytes
from membound.roofline.models import GatedFfn, ModelSpec, MoeFfn, get_model
from membound.roofline.operating_point import OperatingPoint
from membound.roofline.parallel import Parallelism
from membound.roofline.shape import StepShape
from membound.roofline.speculation.steps import Speculation
from membound.roofline.step import step_operators
from membound.roofline.techniques import (
    W8A8,
    EngineSetup,
    Int8Weights,
    KvQuantization,
    NgramSpeculation,
    Sparsity24,
    WeightQuantization,
    engine_setup,
)
from membound.roofline.times.kernels import KernelTimes
from membound.roofline.times.known import RoofTimes, times_for
from membound.roofline.times.operator import Times

PLAIN = EngineSetup()
# dense, mixture, MLA with and without a query rank, state space beside attention, recurrent only, sliding windows
FAMILIES = (
    "Llama-3.1-8B",
    "GPT-J-6B",
    "Mixtral-8x7B",
    "Qwen3-30B-A3B",
    "DeepSeek-V2-Lite",
    "DeepSeek-V3",
    "Jamba-v0.1",
    "Nemotron-Nano-9B-v2",
    "Qwen3-Next-80B-A3B",
    "Mamba-2-2.7B",
    "RWKV-7-1.5B",
    "Gemma-3-27B",
    "gpt-oss-20b",
)
LATENT = ("DeepSeek-V2-Lite", "DeepSeek-V3")
DEVICES = ("A100-SXM4-80GB", "H100-SXM5", "L40S", "RTX-4090", "MI300X", "B200-SXM", "T4")
PROFILES = ("kernels", "graphs", "eager", "vllm")
SETUPS = {
    "plain": PLAIN,
    "int8": engine_setup((Int8Weights(),)),
    "int4": engine_setup((WeightQuantization(format="awq"), KvQuantization())),
    "w8a8": engine_setup((W8A8(),)),
    "unfused": engine_setup((), without=("flash_attention", "mla_absorption")),
}
family, device, profile = st.sampled_from(FAMILIES), st.sampled_from(DEVICES), st.sampled_from(PROFILES)
batches, contexts = st.integers(1, 600), st.integers(40, 8000)


@cache
def times_of(name: str, engine: str = "graphs") -> Times:
    return times_for(get_hardware(name), engine)


def seconds(model: ModelSpec | str, shape: StepShape, times: Times | None = None, setup: EngineSetup = PLAIN) -> float:
    spec = get_model(model) if isinstance(model, str) else model
    return float(step_cost(spec, setup, times or times_of("H100-SXM5"), shape).time_s)


def no_less(larger: float, smaller: float) -> bool:
    """Up to rounding."""
    return larger >= smaller * (1 - 1e-9)


@st.composite
def shapes(draw: st.DrawFn) -> StepShape:
    """A decode, a verification, a prefill, a chunk behind a cached prefix, or prompts that join a decode step."""
    batch, context = float(draw(st.integers(1, 300))), float(draw(st.integers(40, 8000)))
    decode = StepShape.decode(batch, context)
    verify = StepShape.verify(batch, context, float(draw(st.integers(1, 30))))
    tokens, prompts = float(draw(st.integers(1, 3000))), float(draw(st.integers(1, 4)))
    prefill = StepShape.prefill(prompts, tokens, float(draw(st.sampled_from((0, 0, 500)))))
    return draw(st.sampled_from((decode, verify, prefill, decode + prefill)))


# --- whole sequences ------------------------------------------------------------------------------------------------


@given(
    name=st.sampled_from(("Llama-3.1-8B", "GPT-J-6B")),
    ranks=st.sampled_from((2, 4, 8)),
    count=st.integers(1, 16),
    shape=shapes(),
)
def test_ranks_of_dp_share_whole_sequences(name, ranks, count, shape):
    """A sequence is not cut by data parallelism: a step takes what the rank takes that has most of them."""
    setup = replace(PLAIN, parallel=Parallelism(dp=ranks))
    for part in (StepShape.prefill(float(count), 700.0), StepShape.decode(float(count), 900.0)):
        alone = seconds(name, part.divided(count / math.ceil(count / ranks)))
        assert seconds(name, part, setup=setup) == pytest.approx(alone)
    assert no_less(seconds(name, shape), seconds(name, shape, setup=setup))


# --- more work, more time ---------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(name=family, device=device, engine=profile, batch=batches, context=contexts, more=st.integers(1, 400))
def test_a_larger_batch_or_a_longer_context_never_takes_less_time(name, device, engine, batch, context, more):
    times = times_of(device, engine)
    now = seconds(name, StepShape.decode(float(batch), float(context)), times)
    assert no_less(seconds(name, StepShape.decode(float(batch + more), float(context)), times), now)
    assert no_less(seconds(name, StepShape.decode(float(batch), float(context + more)), times), now)


@settings(max_examples=100)
@given(name=family, device=device, tokens=st.integers(1, 6000), more=st.integers(1, 500), cached=st.integers(0, 2000))
def test_a_longer_prompt_never_takes_less_time(name, device, tokens, more, cached):
    times = times_of(device)
    now = seconds(name, StepShape.prefill(1.0, float(tokens), float(cached)), times)
    assert no_less(seconds(name, StepShape.prefill(1.0, float(tokens + more), float(cached)), times), now)
    assert no_less(seconds(name, StepShape.prefill(1.0, float(tokens), float(cached + more)), times), now)
    assert no_less(seconds(name, StepShape.prefill(2.0, float(tokens), float(cached)), times), now)


DIVIDED = {
    "stages": ("Llama-3.1-70B", Parallelism(tp=4, pp=4)),
    "few micro-batches": ("Llama-3.1-70B", Parallelism(tp=2, pp=4, micro_batches=2)),
    "stages and ranks": ("Llama-3.1-70B", Parallelism(tp=2, pp=2, dp=2)),
    "ranks with experts": ("Qwen3-30B-A3B", Parallelism(dp=8, ep=8)),
    "stages and ranks with experts": ("Qwen3-30B-A3B", Parallelism(dp=4, pp=2, ep=4)),
    "a divided context": ("Llama-3.1-70B", Parallelism(tp=2, cp=4)),
    "stages and a divided context": ("Llama-3.1-70B", Parallelism(tp=2, cp=2, pp=2)),
}
lengths = st.sampled_from((300, 1000, 2048, 3000))


@pytest.mark.parametrize("name", DIVIDED)
@settings(max_examples=60, deadline=None)
@given(decoding=st.integers(0, 100), context=contexts, prompts=st.lists(lengths, max_size=6), more=lengths)
def test_one_more_sequence_or_prompt_never_shortens_a_step_of_any_set_up(name, decoding, context, prompts, more):
    """Within what a share of a token of others makes that one more micro-batch takes away."""
    model, parallel = DIVIDED[name]
    setup, spec, times = replace(PLAIN, parallel=parallel), get_model(model), times_of("H100-SXM5", "vllm")

    def taken(shape: StepShape) -> float:
        return float(pipelined_cost(spec, setup, times, shape).time_s)

    assume(decoding or prompts)
    shape = StepShape.decode(float(decoding), float(context))
    for tokens in prompts:
        shape = shape + StepShape.prefill(1.0, float(tokens))
    now = taken(shape)
    assert taken(shape + StepShape.prefill(1.0, float(more))) >= now * 0.995
    assert taken(shape + StepShape.decode(1.0, float(context))) >= now * 0.995


@settings(max_examples=40, deadline=None)
@given(decoding=st.integers(0, 64), tokens=st.integers(34, 8000), pp=st.sampled_from((2, 4, 8)))
def test_stages_never_shorten_the_step_of_a_single_prompt(decoding, tokens, pp):
    spec, times = get_model("Llama-3.1-70B"), times_of("H100-SXM5", "vllm")
    prompt = StepShape.prefill(1.0, float(tokens))
    shape = prompt + StepShape.decode(float(decoding), 1000.0)
    plain, staged = (replace(PLAIN, parallel=Parallelism(tp=2, pp=stages)) for stages in (1, pp))
    one_stage = float(pipelined_cost(spec, plain, times, prompt).time_s)
    assert no_less(float(pipelined_cost(spec, staged, times, shape).time_s), one_stage)


@settings(max_examples=60, deadline=None)
@given(batch=st.integers(1, 40), context=st.integers(1000, 130000), ranks=st.sampled_from((2, 4, 8)))
def test_attention_on_ranks_waits_for_the_one_with_most_sequences(batch, context, ranks):
    spec, setup = get_model("DeepSeek-V3"), replace(PLAIN, parallel=Parallelism(dp=ranks, ep=ranks))

    def attention_s(sequences: float) -> float:
        cost = step_cost(spec, setup, times_of("H200-SXM"), StepShape.decode(sequences, float(context)))
        return sum(float(item.total_s) for item in cost.operators if item.operator.kind == "attention")

    fullest = math.ceil(batch / ranks)
    assert attention_s(float(batch)) == pytest.approx(attention_s(float(fullest * ranks)))
    assert no_less(attention_s(batch + 0.5), attention_s(float(batch)))
    assert no_less(attention_s(batch + 1.0), attention_s(batch + 0.5))


@settings(max_examples=60)
@given(device=device, batch=batches, context=contexts, guesses=st.integers(1, 60))
def test_verification_never_takes_less_time_than_plain_decoding(device, batch, context, guesses):
    times = times_of(device)
    plain = StepShape.decode(float(batch), float(context))
    verify = StepShape.verify(float(batch), float(context + guesses), float(guesses))
    assert no_less(seconds("Llama-3.1-8B", verify, times), seconds("Llama-3.1-8B", plain, times))


@settings(max_examples=60)
@given(device=device, engine=profile, shape=shapes(), layers=st.integers(1, 60), hidden=st.sampled_from((1024, 2048)))
def test_more_layers_or_a_wider_model_never_take_less_time(device, engine, shape, layers, hidden):
    times, model = times_of(device, engine), get_model("Llama-3.1-8B")
    small = model.model_copy(update={"layers": layers, "hidden": hidden})
    now = seconds(small, shape, times)
    assert no_less(seconds(small.model_copy(update={"layers": layers + 3}), shape, times), now)
    assert no_less(seconds(small.model_copy(update={"hidden": hidden * 2}), shape, times), now)
    wider = model.usual_ffn.model_copy(update={"intermediate": model.usual_ffn.intermediate * 2})
    assert no_less(seconds(small.model_copy(update={"ffn": wider}), shape, times), now)


@settings(max_examples=60)
@given(device=device, batch=batches, context=contexts)
def test_more_bits_of_the_same_kernel_never_take_less_time(device, batch, context):
    """Formats with other kernels may: unpacking costs more than it saves where a batch computes already."""
    times, shape = times_of(device), StepShape.decode(float(batch), float(context))
    model = get_model("Llama-3.1-8B")
    for formats in (("int4_row", "int4_g128", "int4_g64", "int4_g32", "int4_g32_zero"), ("int8_row", "int8_g32")):
        taken = [seconds(model, shape, times, engine_setup((WeightQuantization(format=f),))) for f in formats]
        assert all(no_less(later, earlier) for earlier, later in itertools.pairwise(taken))
    cached = [
        seconds(model, shape, times, engine_setup((KvQuantization(format=f),)))
        for f in ("int4", "int4_g32_zero16", "int8")
    ]
    assert all(no_less(later, earlier) for earlier, later in itertools.pairwise(cached))


# --- a better device never hurts --------------------------------------------------------------------------------------


def improved(hardware: HardwareSpec, factor: float) -> dict[str, HardwareSpec]:
    rates = {
        field: {dtype: rate * factor for dtype, rate in getattr(hardware, field).items()}
        for field in ("matrix_flops", "sparse_flops")
    }
    links = {
        field: link.model_copy(update={"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s * factor})
        for field in ("scale_up", "scale_out", "host")
        if (link := getattr(hardware, field)) is not None
    }
    changes: dict[str, dict[str, object]] = {
        "bandwidth": {"bandwidth_bytes_per_s": hardware.bandwidth_bytes_per_s * factor},
        "matrix rate": dict(rates),
        "links": dict(links),
    }
    return {what: hardware.model_copy(update=change) for what, change in changes.items()}


@settings(max_examples=80)
@given(name=family, device=device, shape=shapes(), factor=st.floats(1.01, 4), setup=st.sampled_from(sorted(SETUPS)))
def test_more_bandwidth_rate_or_link_never_hurts(name, device, shape, factor, setup):
    hardware = get_hardware(device)
    parallel = Parallelism(tp=2) if name in ("Llama-3.1-8B", "Mixtral-8x7B", "DeepSeek-V3") else PLAIN.parallel
    setup = replace(SETUPS[setup], parallel=parallel)
    now = seconds(name, shape, KernelTimes(hardware), setup)
    for what, better in improved(hardware, factor).items():
        assert no_less(now, seconds(name, shape, KernelTimes(better), setup)), what


@settings(max_examples=100)
@given(name=family, device=st.sampled_from(sorted(devices())), engine=profile, shape=shapes())
def test_full_efficiency_without_overhead_is_a_lower_bound(name, device, engine, shape):
    hardware = get_hardware(device)
    try:
        fitted = times_for(hardware, engine)
        predicted = seconds(name, shape, fitted)
    except MemboundError:
        assume(False)
    assert no_less(predicted, seconds(name, shape, RoofTimes(hardware)))


# --- equal things cost the same ---------------------------------------------------------------------------------------


def together(many: list[StepShape]) -> StepShape:
    return StepShape(*(np.array([getattr(shape, field) for shape in many]) for field in many[0].columns()))


@settings(max_examples=120)
@given(
    name=family.filter(lambda name: name not in LATENT),
    device=device,
    engine=profile,
    setup=st.sampled_from(sorted(SETUPS)),
    many=st.lists(shapes(), min_size=2, max_size=4),
)
def test_many_steps_in_one_call_cost_what_each_costs_alone(name, device, engine, setup, many):
    times = times_of(device, engine)
    alone = [seconds(name, shape, times, SETUPS[setup]) for shape in many]
    np.testing.assert_allclose(
        step_cost(get_model(name), SETUPS[setup], times, together(many)).time_s, alone, rtol=1e-9
    )


@settings(max_examples=60)
@given(
    name=st.sampled_from(LATENT),
    device=device,
    setup=st.sampled_from(sorted(SETUPS)),
    prompts=st.booleans(),
    sizes=st.lists(st.tuples(st.integers(1, 64), st.integers(40, 4000)), min_size=2, max_size=4),
)
def test_many_steps_of_latent_attention_cost_what_each_costs_alone(name, device, setup, prompts, sizes):
    kind = StepShape.prefill if prompts else StepShape.decode
    many = [kind(float(batch), float(tokens)) for batch, tokens in sizes]
    alone = [seconds(name, shape, times_of(device), SETUPS[setup]) for shape in many]
    found = step_cost(get_model(name), SETUPS[setup], times_of(device), together(many)).time_s
    np.testing.assert_allclose(found, alone, rtol=1e-9)


@pytest.mark.parametrize("name", LATENT)
def test_decode_and_prompts_of_latent_attention_may_share_a_call(name):
    many = [StepShape.decode(1.0, 40.0), StepShape.prefill(1.0, 1.0)]
    found = step_cost(get_model(name), PLAIN, times_of("H100-SXM5"), together(many)).time_s
    np.testing.assert_allclose(found, [seconds(name, shape) for shape in many], rtol=1e-9)


@given(name=family, device=device, batch=batches, context=contexts, steps=st.integers(1, 64))
@settings(max_examples=40)
def test_a_macro_step_is_the_sum_of_its_steps(name, device, batch, context, steps):
    times = times_of(device)
    array = StepShape.decode(np.full(steps, float(batch)), float(context) + np.arange(float(steps)))
    macro = np.sum(step_cost(get_model(name), PLAIN, times, array).time_s)
    single = sum(seconds(name, StepShape.decode(float(batch), float(context + step)), times) for step in range(steps))
    assert macro == pytest.approx(single)


@given(heads=st.sampled_from((8, 16, 32)), batch=st.integers(1, 64), context=contexts)
@settings(max_examples=30)
def test_grouped_queries_with_a_group_of_one_are_multi_head_attention(heads, batch, context):
    """MHA: four matrices of hidden x hidden, and 2 x hidden elements a token in the cache (Vaswani et al., 2017)."""
    model = get_model("Llama-3.1-8B")
    hidden = heads * model.attention.head_dim
    attention = model.attention.model_copy(update={"heads": heads, "kv_heads": heads})
    mha = model.model_copy(update={"hidden": hidden, "attention": attention})
    ops = {op.name: op for op in step_operators(mha, PLAIN, StepShape.decode(float(batch), float(context)))}
    assert ops["qkv"].flops + ops["o"].flops == 2 * batch * 4 * hidden * hidden
    assert ops["qkv"].weight_bytes + ops["o"].weight_bytes == 2 * 4 * hidden * hidden
    assert ops["attention"].kv_bytes == batch * context * 2 * hidden * 2
    assert mha.kv_bytes_per_token(16) == model.layers * 2 * hidden * 2
    shape = StepShape.decode(float(batch), float(context))
    grouped = mha.model_copy(update={"attention": attention.model_copy(update={"kv_heads": heads // 4})})
    assert no_less(seconds(mha, shape), seconds(grouped, shape))


@settings(max_examples=60)
@given(experts=st.sampled_from((2, 4, 8)), width=st.sampled_from((256, 1024)), shape=shapes(), device=device)
def test_a_mixture_that_takes_all_experts_is_a_dense_network_of_their_width(experts, width, shape, device):
    """In FLOPs and weights, and in time under the bare roofs, besides its router; its kernels are others."""
    model = get_model("Llama-3.1-8B")
    moe = model.model_copy(update={"ffn": MoeFfn(experts=experts, top_k=experts, intermediate=width)})
    dense = model.model_copy(update={"ffn": GatedFfn(intermediate=experts * width)})

    def ffn(spec: ModelSpec, amount: str) -> float:
        kinds = ("experts", "gate_up", "down")
        return sum(getattr(op, amount) * op.calls for op in step_operators(spec, PLAIN, shape) if op.name in kinds)

    for amount in ("flops", "weight_bytes"):
        assert ffn(moe, amount) == pytest.approx(ffn(dense, amount), rel=1e-9)
    assert moe.params - dense.params == model.layers * experts * model.hidden
    times = RoofTimes(get_hardware(device))
    (router,) = (op for op in step_operators(moe, PLAIN, shape) if op.name == "router")
    routing_s = router.calls * float(times.of(router, 0.0).time_s)
    both, alone = seconds(moe, shape, times), seconds(dense, shape, times)
    assert alone * (1 - 1e-9) <= both <= (alone + routing_s) * (1 + 1e-9)


@given(name=family, batch=batches, context=contexts)
@settings(max_examples=30)
def test_no_guesses_are_plain_decoding(name, batch, context):
    drafting = Speculation(get_model(name), engine_setup((NgramSpeculation(),))).with_gamma(0)
    shape = StepShape.decode(float(batch), float(context))
    assert drafting.step_s(times_of("H100-SXM5"), shape) == seconds(name, shape)
    assert drafting.speedup(times_of("H100-SXM5"), shape) == 1
    assert StepShape.verify(float(batch), float(context), 0.0) == shape


# --- parts sum to the whole -------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(name=family, tp=st.sampled_from((2, 4, 8)), shape=shapes())
def test_shards_of_tensor_parallelism_sum_to_the_whole(name, tp, shape):
    """Exactly where everything divides; what lies on each device (latents, routers, few KV heads) counts once each."""
    model, setup = get_model(name), replace(PLAIN, parallel=Parallelism(tp=tp))
    try:
        check_parallel(model, setup)
    except MemboundError:
        assume(False)

    def whole(setup: EngineSetup, amount: str) -> float:
        kinds = ("linear", "moe", "attention")
        ops = [op for op in step_operators(model, setup, shape) if op.kind in kinds]
        return sum(float(getattr(op, amount)) * op.calls for op in ops)

    for amount in ("flops", "weight_bytes"):
        one, sharded = whole(PLAIN, amount), tp * whole(setup, amount)
        assert one * (1 - 1e-9) <= sharded < tp * one
        if name in ("Llama-3.1-8B", "GPT-J-6B") and model.vocab % tp == 0:
            assert sharded == pytest.approx(one)


@given(ep=st.sampled_from((2, 4, 8, 16)), batch=st.integers(16, 4096))
@settings(max_examples=30)
def test_the_busiest_rank_of_expert_parallelism_has_its_share_or_more_and_never_all(ep, batch):
    """Random choices are not even ones; with many tokens they are nearly so."""
    model, spread = get_model("DeepSeek-V3"), replace(PLAIN, parallel=Parallelism(dp=ep, ep=ep))

    def routed(setup: EngineSetup, amount: str, tokens: float) -> float:
        ops = step_operators(model, setup, StepShape.decode(tokens, 1000.0))
        return sum(float(getattr(op, amount)) * op.calls for op in ops if op.experts)

    for amount in ("flops", "weight_bytes"):
        whole, rank = routed(PLAIN, amount, float(batch)), routed(spread, amount, float(batch))
        assert whole / ep <= rank * (1 + 1e-9) and rank <= whole * (1 + 1e-9)
        assert ep * routed(spread, amount, 1e7) == pytest.approx(routed(PLAIN, amount, 1e7), rel=0.01)


@given(name=family, batch=st.integers(1, 8), context=st.integers(1, 4000))
@settings(max_examples=40)
def test_caches_of_sequences_sum(name, batch, context):
    model = get_model(name)
    one = kv_bytes(model, PLAIN, float(context), 1.0)
    assert kv_bytes(model, PLAIN, float(batch * context), float(batch)) == pytest.approx(batch * one)


# --- published figures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kv_bytes_per_token"),
    [
        ("Llama-2-7B", 512 * 1024),  # claims.md of the facts, arithmetic 1
        ("Llama-3.1-8B", 128 * 1024),  # roofline-notes.md of the facts, 4.1, as the next two
        ("Llama-3.1-70B", 320 * 1024),
        ("DeepSeek-V3", 70_272),  # 576 elements x 2 bytes x 61 layers
        ("DeepSeek-V2", 67.5 * 1024),  # claims.md, KV cache and attention architecture
        ("SmolLM2-135M", 22.5 * 1024),  # claims.md, runtime caveats
    ],
)
def test_a_token_leaves_the_published_bytes_in_the_cache(name, kv_bytes_per_token):
    model = get_model(name)
    assert model.kv_bytes_per_token(16) == kv_bytes_per_token
    assert kv_bytes(model, PLAIN, 1.0) == kv_bytes_per_token


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [  # roofline-notes.md of the facts, section 6
        ("Llama-2-7B", 6.738, None),
        ("Llama-3.1-405B", 405.8, None),
        ("Mixtral-8x7B", 46.7, None),
        ("Mixtral-8x22B", 140.6, None),
        ("Qwen3-235B-A22B", 235.1, 22.2),
        ("DeepSeek-V2", 235.7, None),
        ("DeepSeek-V3", 671.0, None),
        ("Kimi-K2", 1026.4, None),
        ("gpt-oss-20b", 20.9, None),
        ("gpt-oss-120b", 116.8, None),
        ("Gemma-3-27B", 27.0, None),
    ],
)
def test_models_have_their_published_parameters(name, billions, active):
    model = get_model(name)
    assert model.params / 1e9 == pytest.approx(billions, rel=5e-3)
    if active is not None:
        assert model.active_params / 1e9 == pytest.approx(active, rel=5e-3)


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens", "distinct"),
    [  # claims.md of the facts, MoE; uniform routing
        (8, 2, 1, 2),
        (8, 2, 4, 5.5),
        (8, 2, 8, 7.2),
        (256, 8, 1, 8),
        (256, 8, 8, 57),
        (256, 8, 64, 222),
        (256, 8, 128, 251.6),
    ],
)
def test_tokens_read_the_published_number_of_distinct_experts(experts, top_k, tokens, distinct):
    assert distinct_experts(experts, top_k, float(tokens)) == pytest.approx(distinct, rel=0.01)


@given(top_k=st.integers(1, 8), tokens=st.integers(1, 5000), more=st.integers(1, 100), skew=st.floats(0, 2))
@settings(max_examples=60)
def test_distinct_experts_rise_with_tokens_and_fall_with_skew(top_k, tokens, more, skew):
    experts = 64.0
    now = float(distinct_experts(experts, float(top_k), float(tokens), round(skew, 2)))
    assert top_k * (1 - 1e-3) <= now <= min(experts, top_k * tokens) * (1 + 1e-9)
    assert no_less(float(distinct_experts(experts, float(top_k), float(tokens + more), round(skew, 2))), now)
    assert now <= float(distinct_experts(experts, float(top_k), float(tokens))) * (1 + 1e-3)


@given(name=st.sampled_from(FAMILIES[:2]), device=device, batch=batches, context=contexts)
@settings(max_examples=60)
def test_sparse_weights_gain_at_most_nine_sixteenths_in_bandwidth_bound_decode(name, device, batch, context):
    """16 bits become 9, so that decode gains 1.78 at most; under the bare roofs, where nothing else can hide it."""
    shape, times = StepShape.decode(float(batch), float(context)), RoofTimes(get_hardware(device))
    sparse = engine_setup((Sparsity24(),))
    gain = seconds(name, shape, times) / seconds(name, shape, times, sparse)
    assert 1 - 1e-9 <= gain <= 16 / 9 + 1e-9


# --- speed ------------------------------------------------------------------------------------------------------------


def takes_less_than(limit_s: float, call: Callable[[], object], runs: int) -> bool:
    """Whether any of some runs needs less CPU time, which other programs slow less than they do a clock."""
    for _ in range(runs):
        start = time.process_time()
        call()
        if time.process_time() - start < limit_s:
            return True
    return False


def test_a_million_operating_points_take_less_than_two_seconds():
    model, times = get_model("Llama-3.1-8B"), times_of("H100-SXM5")
    setups = list(SETUPS.values())[:4]
    batch, context = np.arange(1.0, 501.0), np.linspace(100.0, 8000.0, 500)
    found: list[np.ndarray] = []
    assert takes_less_than(2.0, lambda: found.append(decode_grid(model, setups, times, batch, context)), runs=3)
    assert found[0].shape == (4, 500, 500) and found[0].size == 1_000_000
    for index, b, c in ((0, 0, 0), (1, 77, 300), (3, 499, 499)):
        alone = seconds(model, StepShape.decode(batch[b], context[c]), times, setups[index])
        assert found[0][index, b, c] == pytest.approx(alone)


def test_steps_that_share_nothing_are_as_fast_as_a_tenth_of_that():
    """Recorded steps: every operator is evaluated at each of them."""
    model, times, count = get_model("Llama-3.1-8B"), times_of("H100-SXM5"), 100_000
    random = np.random.default_rng(1)
    shape = StepShape.decode(random.integers(1, 500, count) + 0.0, random.integers(100, 8000, count) + 0.0)
    assert takes_less_than(2.0, lambda: step_cost(model, PLAIN, times, shape).time_s, runs=3)


def test_a_single_prediction_takes_less_than_a_millisecond():
    model, hardware = get_model("Llama-3.1-8B"), get_hardware("H100-SXM5")

    def predict() -> float:
        return float(OperatingPoint(model, hardware, PLAIN, "decode", 8, 2048).cost.time_s)

    predict()
    assert takes_less_than(1e-3, predict, runs=50)


def test_importing_costs_little_beside_numpy_and_pydantic():
    """As a ratio of CPU times: a machine with other work makes both longer."""

    def import_s(modules: str) -> float:
        code = f"import time; start = time.process_time(); import {modules}; print(time.process_time() - start)"
        return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    # pydantic loads its own modules when they are first named.
    known = "numpy, numpy.typing, yaml, pydantic.types, pydantic.functional_validators"
    known_s, all_s, package_s = (
        min(import_s(modules) for _ in range(3))
        for modules in (known, "membound.roofline.operating_point", "membound.roofline")
    )
    assert package_s < known_s and all_s < 5.0 * known_s
