"""A deployment under a steady load obeys conservation, limits and monotonicity."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membound.roofline.hardware import get_hardware
from membound.roofline.models import get_model
from membound.roofline.parallel import Parallelism
from membound.roofline.serving import Deployment, StaticBatch, SteadyLoad, mean_context, with_parallel
from membound.roofline.techniques import EngineSetup

H100 = Deployment(get_model("Llama-3.1-8B"), get_hardware("H100-SXM5"), EngineSetup())
LENGTHS = st.integers(1, 4000)


@given(concurrency=st.integers(2, 200), prompt=LENGTHS, output=st.integers(2, 1000))
@settings(max_examples=40)
def test_a_requests_time_is_that_of_its_tokens_and_of_everybodys_prompts(concurrency, prompt, output):
    """Whoever waits for a prompt, all prompts of the batch pass once while a request is served."""
    load = SteadyLoad(H100, concurrency, prompt, output)
    whole_s = load.ttft_s + load.output_tokens * load.tpot_s
    if load.batch == concurrency:
        joined_s = H100.joined_s(load.batch, mean_context(prompt, output))
        alone_s = load.decode_s * output + joined_s + load.batch * load.prompt_s
        assert whole_s == pytest.approx(alone_s, rel=1e-9)
    assert load.tpot_s >= load.decode_s
    assert load.ttft_s >= load.prompt_s


@given(prompt=LENGTHS, output=st.integers(2, 500), concurrency=st.integers(1, 100))
@settings(max_examples=30)
def test_more_clients_wait_longer_and_get_more_done(prompt, output, concurrency):
    one, more = (SteadyLoad(H100, c, prompt, output) for c in (concurrency, concurrency + 8))
    assert more.tpot_s >= one.tpot_s
    # Rows are computed in whole tiles, so that a few more clients may cost a tile and give little for it.
    assert more.output_tokens_per_s >= 0.9 * one.output_tokens_per_s


@given(batch=st.integers(1, 64), prompt=LENGTHS, output=st.integers(1, 300))
@settings(max_examples=30)
def test_a_static_batch_takes_its_prompts_and_its_steps(batch, prompt, output):
    run = StaticBatch(H100, batch, prompt, output)
    assert run.latency_s == pytest.approx(run.prefill_s + (output - 1) * run.tpot_s)
    assert run.output_tokens_per_s * run.latency_s == pytest.approx(batch * output)


def test_prompts_that_need_several_steps_are_chunked_without_a_jump():
    below, above = (H100.prefill_s(1, tokens) for tokens in (H100.chunk_tokens, H100.chunk_tokens + 1))
    assert below < above < 1.1 * below
    assert H100.prefill_s(4, H100.chunk_tokens) == pytest.approx(4 * H100.prefill_s(1, H100.chunk_tokens))


def test_what_does_not_fit_is_not_in_the_batch():
    big = Deployment(get_model("Llama-3.1-70B"), get_hardware("H100-SXM5"), EngineSetup())
    assert big.largest_batch(1000) == 0
    assert with_parallel(big, tp=4).largest_batch(1000) > 0
    full = H100.largest_batch(4000)
    assert SteadyLoad(H100, 10 * full, 3900, 100).batch <= full * 1.05


@pytest.mark.parametrize("pp", [2, 4])
def test_a_pipeline_helps_a_full_batch_and_not_a_single_sequence(pp):
    """With one sequence its stages wait for each other; with many micro-batches each does its share of the layers."""
    staged = with_parallel(H100, pp=pp)
    assert staged.decode_s(1, 1000) > H100.decode_s(1, 1000)
    assert staged.decode_s(256, 4000) < H100.decode_s(256, 4000)
    assert staged.prefill_s(1, 500) >= H100.prefill_s(1, 500)
    prompts = H100.chunk_tokens  # each fills a step: so many micro-batches, and the last leaves behind the others
    turns = (16 + pp - 1) / pp
    alone_s, many_s = staged.prefill_s(1, prompts), staged.prefill_s(16, prompts)
    # the last stage has the matrix of the vocabulary beside its layers, of which a prompt needs one row
    assert turns * alone_s <= many_s <= 1.01 * turns * alone_s


def test_the_bare_roofs_are_never_slower_than_any_engine():
    for profile in ("kernels", "vllm", "sglang", "transformers"):
        engine = replace(H100, setup=EngineSetup(profile=profile))
        for batch, context in ((1, 100), (32, 2000), (256, 4000)):
            assert replace(engine, ideal=True).decode_s(batch, context) < engine.decode_s(batch, context)
        assert replace(engine, ideal=True).prefill_s(4, 2000) < engine.prefill_s(4, 2000)


def test_tensor_parallelism_pays_until_the_links_cost_more_than_it_saves():
    times = [with_parallel(H100, tp=tp).decode_s(1, 1000) for tp in (1, 2, 4, 8)]
    assert times[1] < times[0]
    gains = [before / after for before, after in pairwise(times)]
    assert gains[0] > gains[1] > gains[2]


def test_expert_parallelism_waits_for_the_busiest_device():
    """DeepSeek-V3 on 16 devices: with data-parallel attention each rank's experts are chosen unevenly."""
    parallel = Parallelism(tp=1, dp=16, ep=16)
    deployment = Deployment(
        get_model("DeepSeek-V3"), get_hardware("H200-SXM"), EngineSetup(parallel=parallel, profile="kernels")
    )
    few, many = deployment.decode_s(16, 2000), deployment.decode_s(2048, 2000)
    assert few < many
    assert 2048 / many > 16 / few
