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
    assert "links 9" in result.provenance.notes[-1] or "links 100%" in result.provenance.notes[-1]


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
