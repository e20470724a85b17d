"""Reports of trtllm-bench: as JSON and as a log has them, the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from membound.roofline.errors import MemboundError
from membound.runtime.endpoint.foreign import read_results

RULE = "=" * 59


def report(**performance: Any) -> dict[str, Any]:
    return {
        "engine": {
            "model": "nvidia/Llama-3.1-8B-Instruct-FP8",
            "version": "1.2.0",
            "kv_cache_dtype": "FP8",
            "quantization": "FP8",
        },
        "world_info": {"tp_size": 2, "pp_size": 1, "ep_size": 1, "max_batch_size": 64, "max_num_tokens": 4096},
        "request_info": {
            "num_requests": 100,
            "avg_num_concurrent_requests": 31.5,
            "avg_input_length": 128.0,
            "avg_output_length": 32.0,
        },
        "performance": {
            "total_latency_ms": 2000.0,
            "avg_request_latency_ms": 600.0,
            "request_latency_percentiles_ms": {"average": 600.0, "p50": 590.0, "p90": 650.0, "p99": 700.0},
        }
        | performance,
        "streaming_metrics": {
            "avg_ttft_ms": 100.0,
            "avg_tpot_ms": 16.0,
            "ttft_percentiles": {"average": 100.0, "p50": 90.0, "p90": 150.0, "p99": 190.0},
            "tpot_percentiles": {"average": 16.0, "p50": 15.5, "p90": 17.0, "p99": 18.0},
        },
    }


def as_log(given: dict[str, Any]) -> str:
    """As `report_statistics` prints it, among other lines."""
    engine, world, requests = given["engine"], given["world_info"], given["request_info"]
    performance, streaming = given["performance"], given["streaming_metrics"]

    def title(words: str) -> str:
        return f"{RULE}\n= {words} \n{RULE}\n"

    def breakdown(mark: str, percentiles: dict[str, float]) -> str:
        return "".join(f"[{mark}] {key.upper():<7}: {value:.4f}\n" for key, value in percentiles.items())

    return (
        "[TensorRT-LLM][INFO] Model: something else\n\n"
        + title("PYTORCH BACKEND")
        + f"Model:\t\t\t{engine['model']}\nModel Path:\t\tNone\nTensorRT LLM Version:\t{engine['version']}\n"
        + f"Dtype:\t\t\tbfloat16\nKV Cache Dtype:\t\t{engine['kv_cache_dtype']}\n"
        + f"Quantization:\t\t{engine['quantization']}\n\n"
        + title("REQUEST DETAILS")
        + f"Number of requests:             {requests['num_requests']}\n"
        + f"Number of concurrent requests:  {requests['avg_num_concurrent_requests']:.4f}\n"
        + f"Average Input Length (tokens):  {requests['avg_input_length']:.4f}\n"
        + f"Average Output Length (tokens): {requests['avg_output_length']:.4f}\n"
        + title("WORLD + RUNTIME INFORMATION")
        + f"TP Size:                {world['tp_size']}\nPP Size:                {world['pp_size']}\n"
        + "EP Size:                None\n"
        + f"Max Runtime Batch Size: {world['max_batch_size']}\nMax Runtime Tokens:     {world['max_num_tokens']}\n\n"
        + title("PERFORMANCE OVERVIEW")
        + f"Request Throughput (req/sec):                     {100 / 2:.4f}\n"
        + f"Total Latency (ms):                               {performance['total_latency_ms']:.4f}\n"
        + f"Average request latency (ms):                     {performance['avg_request_latency_ms']:.4f}\n"
        + f"Average time-to-first-token [TTFT] (ms):          {streaming['avg_ttft_ms']:.4f}\n\n"
        + breakdown("TPOT", streaming["tpot_percentiles"])
        + breakdown("TTFT", streaming["ttft_percentiles"])
        + breakdown("Latency", performance["request_latency_percentiles_ms"])
        + title("DATASET DETAILS")
        + "Number of Sequences:  100\nMIN:   128.0000\n"
    )


def imported(path: Path, text: str) -> list[Any]:
    file = path / "report"
    file.write_text(text)
    return read_results(file)


@pytest.mark.parametrize("written", [json.dumps, as_log], ids=["json", "log"])
def test_a_report_is_the_run_of_its_averages(tmp_path, written):
    (result,) = imported(tmp_path, written(report()))
    asked = result.scenario("asked", None, "H100-SXM5", None)
    assert (result.tool, result.version, asked.model) == ("trtllm-bench", "1.2.0", "nvidia/Llama-3.1-8B-Instruct-FP8")
    assert (asked.engine.profile, asked.parallel.tp, asked.parallel.pp) == ("tensorrt-llm-offline", 2, 1)
    assert (asked.engine.max_num_seqs, asked.engine.max_batched_tokens) == (64, 4096)
    assert asked.workload.arrivals.concurrency == 32, "31.5 on average are 32 at a time"
    run = result.run(asked)
    summary = run.summary
    assert (summary.completed, summary.duration_s, summary.requests_per_s) == (100, 2.0, 50.0)
    assert summary.output_tokens_per_s == pytest.approx(100 * 32 / 2.0)
    assert (summary.ttft_s.mean, summary.ttft_s.p99) == pytest.approx((0.1, 0.19))
    assert (summary.tpot_s.mean, summary.tpot_s.p50) == pytest.approx((0.016, 0.0155))
    assert (summary.e2e_s.mean, summary.e2e_s.p90) == pytest.approx((0.6, 0.65))
    assert any("FP8 of weights and FP8 of the KV cache" in note for note in run.provenance.notes)
    assert any("--concurrency" in note for note in run.provenance.notes)


def test_json_and_log_are_one_run(tmp_path):
    (one,), (other,) = (imported(tmp_path, written(report())) for written in (json.dumps, as_log))
    scenarios = [each.scenario("asked", None, "H100-SXM5", None) for each in (one, other)]
    assert scenarios[0] == scenarios[1]
    assert (one.averages, one.duration_s, one.notes) == (other.averages, other.duration_s, other.notes)


def test_a_log_may_have_several_reports_each_with_its_own_numbers(tmp_path):
    log = as_log(report()) + "\n[INFO] next\n" + as_log(report(total_latency_ms=4000.0))
    assert [result.duration_s for result in imported(tmp_path, log)] == [2.0, 4.0]


def test_requests_that_are_all_there_from_the_start_are_users_of_their_own(tmp_path):
    """94.6 of 100 on average: nothing bounds them, as a bound of 95 would leave five for a second wave."""
    document = report()
    document["request_info"]["avg_num_concurrent_requests"] = 94.6
    (result,) = imported(tmp_path, json.dumps(document))
    assert result.scenario("asked", None, "H100-SXM5", None).workload.arrivals.concurrency == 100


def test_a_run_without_streaming_knows_no_first_tokens(tmp_path):
    document = report()
    del document["streaming_metrics"]
    (result,) = imported(tmp_path, json.dumps(document))
    summary = result.run(result.scenario("asked", None, "H100-SXM5", None)).summary
    assert summary.ttft_s.mean is None and summary.tpot_s.mean is None and summary.e2e_s.mean == pytest.approx(0.6)


def test_an_engine_of_the_first_versions_has_its_profile(tmp_path):
    document = report()
    document["engine"]["version"] = "0.14.0"
    (result,) = imported(tmp_path, json.dumps(document))
    assert result.profile == "tensorrt-llm-0"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            json.dumps(report() | {"request_info": {"num_requests": 0}}),
            "field 'num_requests' is 0; it must be 1 or more",
        ),
        (json.dumps(report() | {"request_info": {"num_requests": 5}}), "field 'avg_input_length' is missing"),
        (json.dumps(report(total_latency_ms=-1.0)), "must not be negative"),
        (as_log(report()).replace("Total Latency", "Total"), "field 'total_latency_ms' is missing"),
        ("= PERFORMANCE OVERVIEW\nnothing else", "is not JSON"),
    ],
    ids=["no request", "no lengths", "negative", "cut", "empty overview"],
)
def test_what_is_wrong_is_said_of_its_field(tmp_path, text, said):
    with pytest.raises(MemboundError) as caught:
        imported(tmp_path, text)
    assert said in str(caught.value) and "\n" not in str(caught.value)
