"""Does what a server says of itself reach the record, and only where it is of this run?"""

from __future__ import annotations

import asyncio

import pytest

from membound.runtime.endpoint.address import Endpoint
from membound.runtime.endpoint.measure import measure
from membound.runtime.endpoint.server_metrics import ServerMetrics, parse, shared_with_others

EXPOSED = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="a b}} 1"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="m"}} 2.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
vllm:num_preemptions_total{{engine="0",model_name="m"}} {preemptions}
vllm:num_preemptions_created{{engine="0",model_name="m"}} 1.7e9
vllm:generation_tokens_total{{engine="0",model_name="m"}} {generated}
vllm:iteration_tokens_total_count{{engine="0",model_name="m"}} {steps}
vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {queries}
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
"""


def exposed(served: int, tokens: int | None = None) -> str:
    """Metrics of a server that has served so many requests."""
    return EXPOSED.format(
        running=1,
        preemptions=served // 4,
        generated=10 * served if tokens is None else tokens,
        steps=5 * served,
        queries=100 * served,
        hits=25 * served,
        drafted=20 * served,
        accepted=12 * served,
    )


def test_labels_that_look_like_values_are_labels() -> None:
    assert parse(exposed(1))["vllm:num_requests_running"] == [1.0]
    assert parse('vllm:a{x="1"} 2 1700000000\nvllm:a{x="2"} 3\nother 1\nvllm:b NaN\nvllm:c +Inf\nvllm:d x') == {
        "vllm:a": [2.0, 3.0]
    }
    assert parse("<html>vllm:a 1</html>") == {}


def test_counters_are_what_they_grew_by_and_states_are_means() -> None:
    told = ServerMetrics([parse(exposed(served)) for served in (4, 5, 12)]).summary()
    assert (told["preemptions"], told["generated"]) == (2, 80)
    assert (told["prefix_hit_rate"], told["acceptance_rate"], told["tokens_per_step"]) == (0.25, 0.6, 2.0)
    assert (told["kv_usage_mean"], told["running_max"], told["waiting_mean"]) == (0.25, 1, 2)


def test_other_engines_say_it_by_other_names() -> None:
    sglang = 'sglang:num_running_reqs{{tp_rank="0"}} 3\nsglang:token_usage 0.5\nsglang:generation_tokens_total {0}\n'
    sglang += "sglang:prompt_tokens_total {1}\nsglang:cached_tokens_total {0}\nsglang:num_retracted_requests_total 1\n"
    told = ServerMetrics([parse(sglang.format(0, 0)), parse(sglang.format(30, 120))]).summary()
    assert (told["generated"], told["prefix_hit_rate"], told["preemptions"]) == (30, 0.25, 0)
    assert (told["running_max"], told["kv_usage_mean"]) == (3, 0.5)
    llama = "llamacpp:requests_processing 2\nllamacpp:tokens_predicted_total {0}\nllamacpp:n_decode_total {1}\n"
    told = ServerMetrics([parse(llama.format(0, 0)), parse(llama.format(30, 10))]).summary()
    assert (told["tokens_per_step"], told["running_mean"]) == (3.0, 2.0)


def test_a_server_that_was_started_again_tells_no_counts() -> None:
    told = ServerMetrics([parse(exposed(served)) for served in (9, 2)]).summary()
    assert not {"preemptions", "generated", "acceptance_rate"} & told.keys()


def test_what_one_reading_lacks_is_not_told() -> None:
    assert ServerMetrics([parse(exposed(1))]).summary() == {}
    assert "preemptions" not in ServerMetrics([{"vllm:other": [1.0]}, {"vllm:other": [2.0]}]).summary()


def test_counters_of_others_are_told_from_ones_own() -> None:
    assert not shared_with_others({"generated": 100}, 100)
    assert shared_with_others({"generated": 150}, 100)
    assert not shared_with_others({}, 100)


def test_metrics_of_the_run_are_in_its_summary(serving, well, scenario) -> None:
    tokens = {"kind": "fixed", "tokens": 10}
    with serving(well, metrics=lambda server: exposed(len(server.asked))) as server:
        run = measure(scenario(output_tokens=tokens), Endpoint.of(server.url))
    summary = run.summary
    assert (summary.preemptions, summary.acceptance_rate, summary.prefix_hit_rate) == (3, 0.6, 0.25)
    assert (summary.tokens_per_step, summary.kv_utilization) == (2.0, 0.25)
    assert run.to_json()["provenance"]["endpoint"]["server"]["generated"] == 120
    assert any("60% of drafts accepted" in note for note in run.provenance.notes)


def test_a_server_that_others_use_keeps_its_counters_out_of_the_summary(serving, well, scenario) -> None:
    with serving(well, metrics=lambda server: exposed(len(server.asked), 1000 * len(server.asked))) as server:
        run = measure(scenario(), Endpoint.of(server.url))
    assert (run.summary.preemptions, run.summary.acceptance_rate) == (None, None)
    assert any("others used it" in note for note in run.provenance.notes)


def test_a_server_that_sends_several_tokens_in_an_event_is_not_used_by_others(serving, scenario) -> None:
    async def speculating(exchange) -> None:
        await exchange.head()
        for _ in range(3):
            await exchange.event(exchange.token(" four words at once"))
        await exchange.end(exchange.usage(10))

    tokens = {"kind": "fixed", "tokens": 10}
    with serving(speculating, metrics=lambda server: exposed(len(server.asked))) as server:
        run = measure(scenario(output_tokens=tokens), Endpoint.of(server.url))
    assert run.summary.acceptance_rate == 0.6
    assert not any("others used it" in note for note in run.provenance.notes)


@pytest.mark.parametrize("said", ["", "<html></html>", "vllm:num_requests_running\x00 1", "x" * (9 << 20)])
def test_metrics_that_are_none_are_no_error(serving, well, scenario, said: str) -> None:
    with serving(well, metrics=lambda server: said) as server:
        run = measure(scenario(requests=2), Endpoint.of(server.url))
    assert run.summary.completed == 2
    assert (run.summary.kv_utilization, run.summary.bottleneck_share) == (None, {})
    assert len(run.steps["time_s"]) == 0


def test_a_server_says_of_each_request_what_it_had_cached(serving, scenario) -> None:
    async def caching(exchange) -> None:
        await exchange.head()
        await exchange.event(exchange.token(finish="length"))
        used = {"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
        await exchange.end({"choices": [], "usage": used})
        await asyncio.sleep(0)

    with serving(caching) as server:
        run = measure(scenario(output_tokens={"kind": "fixed", "tokens": 1}), Endpoint.of(server.url))
    assert run.summary.prefix_hit_rate == pytest.approx(0.4)
