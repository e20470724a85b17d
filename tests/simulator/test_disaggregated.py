"""Prompts and outputs on engines of their own: nothing is lost, and the link is paid for."""

from __future__ import annotations

import numpy as np
import pytest

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.memory import kv_bytes
from membound.roofline.models.files import resolve_model
from membound.roofline.scenario import Scenario, parse_scenario
from membound.simulator.run import run


def scenario(
    rate_rps: float, disaggregation: dict | None, requests: int = 300, tokens: int = 1000, **engine
) -> Scenario:
    return parse_scenario(
        {
            "name": "pools",
            "model": "Llama-3.1-8B",
            "hardware": "H100-SXM5",
            "engine": {"max_num_seqs": 64, "batching": "chunked_prefill", "disaggregation": disaggregation} | engine,
            "workload": {
                "arrivals": {"kind": "poisson", "rate_rps": rate_rps},
                "requests": requests,
                "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": tokens}},
                "output_tokens": {"kind": "uniform", "low": 1, "high": 60},
                "seed": 4,
            },
        }
    )


@pytest.mark.parametrize("pools", [(1, 1), (2, 1), (1, 3)])
@pytest.mark.parametrize("num_blocks", [None, 150])
def test_every_request_ends_once_and_every_token_is_emitted_once(pools, num_blocks):
    settings = {"prefill_engines": pools[0], "decode_engines": pools[1]}
    result = run(scenario(15.0, settings, num_blocks=num_blocks))
    assert result.requests["id"].tolist() == list(range(300)) and result.summary.completed == 300
    assert result.requests["output_tokens"].sum() == result.steps["emitted"].sum()
    assert sum(result.summary.bottleneck_share.values()) == pytest.approx(1)
    if num_blocks is None:
        assert result.steps["prefill_tokens"].sum() == result.requests["prompt_tokens"].sum()


def test_a_lone_request_waits_for_its_whole_cache_or_for_its_last_layer():
    """Second token = first token + transfer + one step of decode; layer by layer only the last layer is waited for."""
    spec, setup = resolve_model("Llama-3.1-8B"), scenario(1.0, None).setup
    cache_bytes = float(kv_bytes(spec, setup, 1000.0, 1.0))
    link, latency_s = 50e9, get_hardware("H100-SXM5").scale_out.latency_s
    gaps = {}
    for layerwise in (False, True):
        chosen = scenario(1e-3, {"link_bytes_per_s": link, "layerwise": layerwise}, requests=3)
        table = run(chosen.with_value("workload.output_tokens", {"kind": "fixed", "tokens": 2})).requests
        gaps[layerwise] = np.mean(table["finished_s"] - table["first_token_s"])
    step_s = gaps[False] - cache_bytes / link - latency_s
    assert 0.004 < step_s < 0.02
    assert gaps[True] == pytest.approx(step_s + cache_bytes / link / spec.layers + latency_s, rel=1e-6)


def test_a_slow_link_holds_everybody_up_at_its_rate():
    """Caches leave one after the other: their mean distance is a transfer when the link is the bottleneck."""
    spec, setup = resolve_model("Llama-3.1-8B"), scenario(1.0, None).setup
    transfer_s = float(kv_bytes(spec, setup, 1000.0, 1.0)) / 0.5e9
    result = run(scenario(50.0, {"link_bytes_per_s": 0.5e9}))
    several = result.requests["output_tokens"] > 1
    assert result.summary.duration_s == pytest.approx(np.sum(several) * transfer_s, rel=0.05)
    (busy,) = (note for note in result.provenance.notes if "links" in note)
    assert "links 9" in busy or "links 100%" in busy


def test_decodes_are_never_held_up_by_prompts_and_that_takes_more_devices():
    together, apart = run(scenario(10.0, None)), run(scenario(10.0, {}))
    assert apart.summary.tpot_s.p99 < together.summary.tpot_s.p99
    assert apart.summary.itl_s.p99 < 0.5 * together.summary.itl_s.p99
    assert apart.summary.bottleneck_share["idle"] > 0.3


def test_what_does_not_fit_into_an_engine_for_outputs_is_refused_before_its_prompt_is_computed():
    result = run(scenario(10.0, {}, num_blocks=64))
    refused = ~result.requests["completed"]
    assert np.all(result.requests["prompt_tokens"][refused] + 60 > 64 * 16)
    assert refused.any() and np.all(np.isnan(result.requests["admitted_s"][refused]))


def test_without_a_link_one_sentence_says_what_to_give():
    hardware = get_hardware("H100-SXM5").model_copy(update={"scale_out": None})
    with pytest.raises(MemboundError, match=r"give engine\.disaggregation\.link_bytes_per_s"):
        run(scenario(10.0, {}), hardware)


def test_pools_may_be_divided_over_devices_in_their_own_ways():
    """The scenario's own way changes nothing; twice the devices for prompts makes first tokens sooner, and costs."""
    same = run(scenario(10.0, {"decode_parallel": {"tp": 1}, "prefill_parallel": {"tp": 1}}))
    plain = run(scenario(10.0, {}))
    assert same.summary == plain.summary
    wide = run(scenario(10.0, {"prefill_parallel": {"tp": 2}}))
    assert wide.summary.completed == 300
    assert wide.summary.ttft_s.mean < plain.summary.ttft_s.mean
    assert wide.summary.tpot_s.mean == pytest.approx(plain.summary.tpot_s.mean, rel=0.1)
    ratio = wide.summary.cost_usd_per_million_tokens / plain.summary.cost_usd_per_million_tokens
    assert ratio == pytest.approx(1.5, rel=0.05)


def test_a_cache_crosses_as_many_links_as_the_smaller_engine_has_devices():
    spec, setup = resolve_model("Llama-3.1-8B"), scenario(1.0, None).setup
    gaps = {}
    for tp in (1, 2):
        pools = {"layerwise": False, "prefill_parallel": {"tp": tp}, "decode_parallel": {"tp": 2}}
        chosen = scenario(1e-3, pools, requests=3).with_value("workload.output_tokens", {"kind": "fixed", "tokens": 2})
        table = run(chosen).requests
        gaps[tp] = np.mean(table["finished_s"] - table["first_token_s"])
    link = get_hardware("H100-SXM5").scale_out.bandwidth_bytes_per_s
    assert gaps[1] - gaps[2] == pytest.approx(float(kv_bytes(spec, setup, 1000.0, 1.0)) / link / 2, rel=1e-6)


def most_held(table: dict, block_size: int = 16) -> int:
    """Blocks of prompts that have their first token and not their last, of all requests at a time."""
    several = table["output_tokens"] > 1
    blocks = -(-table["prompt_tokens"][several] // block_size)
    moments = np.concatenate([table["first_token_s"][several], table["finished_s"][several]])
    order = np.lexsort((np.repeat([1, 0], len(blocks)), moments))
    return int(np.cumsum(np.concatenate([blocks, -blocks])[order]).max())


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("engine", [{"num_blocks": 150}, {"num_blocks": 400, "prefix_caching": True}])
@pytest.mark.parametrize("pools", [(4, 1), (1, 1), (2, 3)])
def test_every_cache_is_in_the_memory_of_an_engine_at_all_times(pools, engine, layerwise):
    """Who wrote a first token holds the blocks of the prompt in one pool or the other, however slow the others are."""
    settings = {"prefill_engines": pools[0], "decode_engines": pools[1], "layerwise": layerwise}
    result = run(scenario(60.0, settings | {"link_bytes_per_s": 5e9}, **engine))
    assert result.summary.completed == 300
    assert 0 < most_held(result.requests) <= sum(pools) * engine["num_blocks"]


def test_a_cache_stays_where_it_was_computed_until_it_has_crossed_also_beside_a_prefix_cache():
    """Requests that share nothing are served alike with one and without; blocks for two prompts are the bottleneck."""
    settings = {"link_bytes_per_s": 0.5e9, "layerwise": False}
    chosen = scenario(50.0, settings, requests=60, num_blocks=130)
    plain, cached = run(chosen), run(chosen.with_value("engine.prefix_caching", True))
    for name in ("first_token_s", "finished_s"):
        np.testing.assert_allclose(cached.requests[name], plain.requests[name], rtol=1e-9)
    assert plain.summary.ttft_s.p50 > 5.0, "prompts wait for the caches of those before them to leave"


def test_an_engine_without_memory_holds_up_those_that_compute_its_prompts():
    few, many = (run(scenario(60.0, {"prefill_engines": 4}, num_blocks=n)).summary for n in (150, 5000))
    assert few.ttft_s.p50 > 5 * many.ttft_s.p50


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize(("pools", "links"), [((1, 1), 1), ((4, 1), 1), ((1, 3), 1), ((2, 2), 2)])
def test_transfers_share_the_link_of_the_engine_that_sends_and_of_the_one_that_takes(pools, links, layerwise):
    spec, setup = resolve_model("Llama-3.1-8B"), scenario(1.0, None).setup
    transfer_s = float(kv_bytes(spec, setup, 1000.0, 1.0)) / 0.5e9
    settings = {"prefill_engines": pools[0], "decode_engines": pools[1], "link_bytes_per_s": 0.5e9}
    result = run(scenario(100.0, settings | {"layerwise": layerwise}))
    several = result.requests["output_tokens"] > 1
    assert result.summary.duration_s == pytest.approx(np.sum(several) * transfer_s / links, rel=0.06)


def test_ranks_send_and_take_over_links_of_their_own():
    """Half of an engine's link each: a lone cache takes twice as long from one rank of two as from a single one."""
    gaps = {}
    for dp in (1, 2):
        settings = {"link_bytes_per_s": 1e9, "layerwise": False}
        chosen = scenario(1e-3, settings, requests=3).with_values(
            {"model": "Qwen3-30B-A3B", "parallel": {"dp": dp, "ep": dp}, "hardware": "H200-SXM"}
        )
        table = run(chosen.with_value("workload.output_tokens", {"kind": "fixed", "tokens": 2})).requests
        gaps[dp] = np.mean(table["finished_s"] - table["first_token_s"])
    cache_bytes = float(kv_bytes(resolve_model("Qwen3-30B-A3B"), scenario(1.0, None).setup, 1000.0, 1.0))
    assert gaps[2] - gaps[1] == pytest.approx(cache_bytes / 1e9, rel=0.1)
