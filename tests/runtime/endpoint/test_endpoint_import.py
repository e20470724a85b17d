"""Do results of other tools mean here what they mean there, and is what is none of them one sentence?"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from membound.roofline.errors import MemboundError
from membound.roofline.scenario import load_scenario, parse_scenario
from membound.runtime.endpoint.foreign import read_results

EPOCH_S, EPOCH_NS = 1_759_813_207.5, 1_759_813_207_500_000_363


def vllm(detailed: bool = True, lost: int = 1, **changed: Any) -> dict[str, Any]:
    """Three requests of 5 tokens, 10 ms apart from the second token on; `lost` more failed."""
    document: dict[str, Any] = {
        "date": "20260301-101112",
        "backend": "vllm",
        "model_id": "meta-llama/Llama-3.1-8B-Instruct",
        "num_prompts": 3 + lost,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": 2,
        "duration": 2.0,
        "completed": 3,
        "failed": lost,
        "total_input_tokens": 300,
        "total_output_tokens": 15,
        "request_throughput": 1.5,
        "mean_ttft_ms": 50.0,
        "median_ttft_ms": 50.0,
        "p99_ttft_ms": 60.0,
        "mean_tpot_ms": 10.0,
    }
    if detailed:
        document |= {
            "input_lens": [100] * (3 + lost),
            "output_lens": [5] * 3 + [0] * lost,
            "ttfts": [0.05] * 3 + [0.0] * lost,
            "itls": [[0.01] * 4] * 3 + [[]] * lost,
            "start_times": [7.0 + 0.25 * i for i in range(3 + lost)],
            "errors": [""] * 3 + ["Traceback:\n  File\nTimeoutError: too slow\n"] * lost,
            "generated_texts": ["x"] * (3 + lost),
        }
    return document | changed


def guidellm(old: bool = False, **changed: Any) -> dict[str, Any]:
    """A benchmark of two requests and a lost one, in the form of 2026 or of version 0.2."""
    begin, end = (EPOCH_S + i for i in (0, 2))
    if old:
        rows = [
            {
                "prompt_tokens": 100,
                "output_tokens": 5,
                "start_time": begin + i,
                "first_token_time": begin + i + 0.05,
                "last_token_time": begin + i + 0.09,
                "end_time": begin + i + 0.1,
            }
            for i in (0, 1)
        ]
        settings_of = {"args": {"strategy": {"type_": "constant", "rate": 2.5}}, "worker": {"backend_model": "m"}}
        lost = {"prompt_tokens": 100, "output_tokens": 0, "start_time": begin, "end_time": end, "error": "refused"}
    else:
        rows = [
            {
                "prompt_tokens": 100,
                "output_tokens": 5,
                "request_start_time": begin + i,
                "request_end_time": begin + i + 0.1,
                "info": {
                    "timings": {
                        "request_start": begin + i,
                        "first_token_iteration": begin + i + 0.05,
                        "last_token_iteration": begin + i + 0.09,
                        "request_end": begin + i + 0.1,
                    }
                },
            }
            for i in (0, 1)
        ]
        settings_of = {"config": {"strategy": {"type_": "concurrent", "streams": 2}, "backend": {"model": "m"}}}
        lost = {"prompt_tokens": 100, "info": {"error": "refused", "timings": {"resolve_start": begin}}}
    benchmark = {
        **settings_of,
        "metrics": {
            "request_totals": {"successful": 2, "errored": 1, "incomplete": 3},
            "prompt_token_count": {"successful": {"mean": 100.0}},
            "output_token_count": {"successful": {"mean": 5.0}},
            "time_to_first_token_ms": {"successful": {"mean": 50, "median": 50, "percentiles": {"p90": 50, "p99": 50}}},
            "request_latency": {"successful": {"mean": 0.09, "median": 0.09, "percentiles": {"p99": 0.09}}},
        },
        "requests": {"successful": rows, "errored": [lost], "incomplete": []},
        "start_time": begin,
        "end_time": end,
    }
    return {
        "metadata": {"guidellm_version": "0.6.0"},
        "args": {"model": "org/model", "backend_kwargs": {"api_key": "s3cr3t"}},
        "benchmarks": [benchmark | changed],
    }


def aiperf_line(index: int, phase: str = "profiling", **changed: Any) -> dict[str, Any]:
    """A request of 5 tokens that began so many quarters of a second after the first."""
    start = EPOCH_NS + 250_000_000 * index
    return {
        "metadata": {
            "session_num": index,
            "request_start_ns": start,
            "request_ack_ns": start + 1_000_000,
            "request_end_ns": start + 90_000_000,
            "benchmark_phase": phase,
            "was_cancelled": False,
            "cancellation_time_ns": None,
        },
        "metrics": {
            "input_sequence_length": {"value": 100, "unit": "tokens"},
            "output_sequence_length": {"value": 5, "unit": "tokens"},
            "time_to_first_token": {"value": 50.0, "unit": "ms"},
            "request_latency": {"value": 0.09, "unit": "s"},
            "inter_chunk_latency": {"value": [10.0, 10.0, 10.0, 10.0], "unit": "ms"},
        },
        "error": None,
    } | changed


def aiperf_summary(**changed: Any) -> dict[str, Any]:
    return {
        "schema_version": "1.5",
        "aiperf_version": "0.14.0",
        "request_count": {"unit": "requests", "avg": 20.0},
        "error_request_count": {"unit": "requests", "avg": 1.0},
        "benchmark_duration": {"unit": "sec", "avg": 4.0},
        "request_throughput": {"unit": "requests/sec", "avg": 5.0},
        "request_latency": {"unit": "ms", "avg": 90.0, "p50": 90.0, "p90": 91.0, "p99": 92.0, "count": 20},
        "time_to_first_token": {"unit": "ms", "avg": 50.0, "p50": 50.0, "p90": 51.0, "p99": 52.0},
        "inter_token_latency": {"unit": "ms", "avg": 10.0, "p50": 10.0, "p90": 10.0, "p99": 10.0},
        "input_sequence_length": {"unit": "tokens", "avg": 100.0},
        "output_sequence_length": {"unit": "tokens", "avg": 5.0},
        "input_config": {"models": {"items": [{"name": "org/model"}]}, "phases": [{"concurrency": 8}]},
        "run_info": {"cli_command": "aiperf profile"},
    } | changed


def written(path: Path, *documents: Any, name: str = "results.json") -> Path:
    file = path / name
    file.write_text("\n".join(json.dumps(document) for document in documents))
    return file


def the_run(path: Path, *documents: Any):
    (result,) = read_results(written(path, *documents))
    return result, result.run(result.scenario("a name", None, None, None))


@pytest.mark.parametrize(
    ("documents", "failed", "gaps"),
    [
        ([vllm()], 1, 12),
        ([guidellm()], 1, 0),
        ([guidellm(old=True)], 1, 0),
        ([aiperf_line(0), aiperf_line(1), aiperf_line(2, error={"code": 499, "message": "cut"})], 1, 8),
    ],
    ids=["vllm", "guidellm", "guidellm-0.2", "aiperf"],
)
def test_each_request_keeps_its_times(tmp_path: Path, documents: list[Any], failed: int, gaps: int) -> None:
    _, run = the_run(tmp_path, *documents)
    summary, table = run.summary, run.requests
    assert summary.completed + summary.failed == summary.requests == len(table["id"])
    assert (summary.failed, len(run.itl_s)) == (failed, gaps)
    assert summary.ttft_s.p50 == pytest.approx(0.05)
    assert summary.tpot_s.p50 == pytest.approx(0.01)
    assert summary.e2e_s.p50 == pytest.approx(0.09)
    done = table["completed"]
    assert table["arrival_s"].min() == 0.0 and (table["arrival_s"] < 2).all()
    assert (table["prompt_tokens"] == 100).all() and (table["output_tokens"][done] == 5).all()
    if gaps:
        spans = (table["finished_s"] - table["first_token_s"])[done]
        assert float(np.sum(spans)) == pytest.approx(float(np.sum(run.itl_s.values())))
    assert run.provenance.producer == "endpoint" and summary.bottleneck_share == {}


def test_the_scenario_says_what_was_asked(tmp_path: Path) -> None:
    _, run = the_run(tmp_path, vllm())
    workload = run.scenario.workload
    assert (run.scenario.model, run.scenario.name) == ("meta-llama/Llama-3.1-8B-Instruct", "a-name")
    assert workload.arrivals.model_dump()["concurrency"] == 2
    assert workload.requests == 4
    assert (workload.prompts.tokens.tokens, workload.output_tokens.tokens) == (100, 5)
    assert parse_scenario(run.scenario.model_dump(mode="json")) == run.scenario


@pytest.mark.parametrize(
    ("document", "arrivals"),
    [
        (vllm(request_rate=4.0), {"kind": "poisson", "rate_rps": 4.0}),
        (vllm(request_rate=4.0, burstiness=4.0), {"kind": "gamma", "rate_rps": 4.0, "cv": 0.5}),
        (vllm(max_concurrency=None), {"kind": "closed_loop", "concurrency": 4, "think": None}),
        (guidellm(old=True), {"kind": "constant", "rate_rps": 2.5}),
        (guidellm(), {"kind": "closed_loop", "concurrency": 2, "think": None}),
        (aiperf_summary(), {"kind": "closed_loop", "concurrency": 8, "think": None}),
        (aiperf_line(0), {"kind": "closed_loop", "concurrency": 1, "think": None}),
    ],
)
def test_arrivals_are_those_that_the_tool_made(tmp_path: Path, document: Any, arrivals: dict[str, Any]) -> None:
    _, run = the_run(tmp_path, document)
    assert run.scenario.workload.arrivals.model_dump() == arrivals


def test_averages_alone_are_a_summary_without_requests(tmp_path: Path) -> None:
    _, run = the_run(tmp_path, vllm(detailed=False))
    assert (run.summary.requests, run.summary.completed, run.summary.failed) == (4, 3, 1)
    assert (run.summary.ttft_s.mean, run.summary.ttft_s.p99, run.summary.ttft_s.p90) == (0.05, 0.06, None)
    assert run.summary.output_tokens_per_s == pytest.approx(15 / 2.0)
    assert run.summary.total_tokens_per_s == pytest.approx(315 / 2.0)
    assert len(run.requests["id"]) == 0
    _, run = the_run(tmp_path, aiperf_summary())
    assert (run.summary.requests, run.summary.requests_per_s, run.summary.tpot_s.mean) == (21, 5.0, 0.01)
    assert (run.scenario.model, run.provenance.versions) == ("org/model", {"AIPerf": "0.14.0"})


def test_averages_say_that_all_requests_are_taken_to_be_alike(tmp_path: Path) -> None:
    (known,) = read_results(written(tmp_path, vllm()))
    (alone,) = read_results(written(tmp_path, vllm(detailed=False)))
    assert known.alike is None
    assert alone.alike is not None and "100 tokens in and 5 out" in alone.alike


def test_a_file_of_sglang_says_its_model_its_devices_and_whole_latencies(tmp_path: Path) -> None:
    server = {"model_path": "Qwen/Qwen3-32B", "tp_size": 2}
    of_sglang = {"backend": "sglang", "model_id": None, "server_info": server, "mean_e2e_latency_ms": 90.0}
    (result,) = read_results(written(tmp_path, vllm(detailed=False, **of_sglang)))
    asked = result.scenario("asked", None, "H100-SXM5", None)
    assert result.tool == "SGLang bench_serving"
    assert (asked.model, asked.engine.profile, asked.parallel.tp) == ("Qwen/Qwen3-32B", "sglang", 2)
    assert result.run(asked).summary.e2e_s.mean == pytest.approx(0.09)


def test_details_and_averages_of_a_run_agree(tmp_path: Path) -> None:
    runs = [the_run(tmp_path, vllm(detailed=detailed))[1] for detailed in (True, False)]
    for name in ("requests", "completed", "failed", "duration_s"):
        assert getattr(runs[0].summary, name) == getattr(runs[1].summary, name)
    for name in ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s"):
        assert getattr(runs[0].summary, name) == pytest.approx(getattr(runs[1].summary, name))


def test_a_sample_of_requests_does_not_stand_for_all(tmp_path: Path) -> None:
    document = guidellm()
    document["benchmarks"][0]["metrics"]["request_totals"]["successful"] = 200
    _, run = the_run(tmp_path, document)
    assert (run.summary.completed, run.summary.requests_per_s) == (200, 100.0)
    assert any("2 of 200 requests" in note for note in run.provenance.notes)


def test_a_sweep_is_several_runs_and_appended_results_too(tmp_path: Path) -> None:
    document = guidellm()
    document["benchmarks"] *= 3
    assert len(read_results(written(tmp_path, document))) == 3
    assert len(read_results(written(tmp_path, vllm(), vllm(detailed=False)))) == 2


def test_the_warm_up_is_left_out(tmp_path: Path) -> None:
    _, run = the_run(tmp_path, aiperf_line(0, "warmup"), aiperf_line(4), aiperf_line(5))
    assert run.summary.requests == 2
    assert run.requests["arrival_s"].tolist() == [0.0, pytest.approx(0.25)]


def test_no_key_of_a_file_is_kept(tmp_path: Path) -> None:
    _, run = the_run(tmp_path, guidellm())
    assert "s3cr3t" not in repr(run.to_json())


def test_a_result_may_be_of_a_scenario_that_is_known(tmp_path: Path) -> None:
    (result,) = read_results(written(tmp_path, vllm(detailed=False)))
    scenario = load_scenario("live-cpu")
    run = result.run(scenario)
    assert run.scenario.name == "live-cpu"
    assert run.summary.slo_attainment == 0.75
    assert any("objective" in note for note in run.provenance.notes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("{", "is not JSON: it goes wrong at line"),
        ("<html></html>", "is not JSON"),
        ("[" * 100_000, "nested too deep"),
        ("[1, 2]", "is a list, not a mapping"),
        ('{"a": 1}', "is no result that is known"),
        ('{"benchmarks": []}', "holds no benchmark"),
        ('{"benchmarks": 3}', "field 'benchmarks' is 3; it must be a list"),
        (json.dumps(vllm()) + "\n{", "line 2 is not JSON; the file may be cut short"),
        (json.dumps(vllm(duration=None)), "field 'duration' is missing"),
        (json.dumps(vllm(duration=-1)), "field 'duration' is -1; it must not be negative"),
        (json.dumps(vllm(duration=0)), "benchmark 1 took 0 s, in which nothing is served"),
        (json.dumps(vllm(duration=float("nan"))), "field 'duration' is nan; it must be a number"),
        (json.dumps(vllm(ttfts=[0.1])), "its lists of requests have 1 and 4 items"),
        (json.dumps(vllm(itls=[3, 3, 3, 3])), "field 'itls', item 0: field 'gaps' is 3; it must be a list"),
        (json.dumps(aiperf_line(0, "warmup")), "holds the warm-up alone"),
        (json.dumps(aiperf_summary(request_latency={"unit": "weeks", "avg": 1})), "'unit' is 'weeks'"),
    ],
)
def test_what_is_no_result_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "results.json"
    file.write_text(text)
    with pytest.raises(MemboundError) as error:
        read_results(file)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_files_that_cannot_be_read_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    for file in (tmp_path, tmp_path / "none", tmp_path / "binary", Path("a\0b")):
        with pytest.raises(MemboundError, match=r"^results file"):
            read_results(file)


def _paths(document: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [at, *(path for key, value in inner for path in _paths(value, (*at, key)))]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_and_never_a_crash(tmp_path: Path, data: st.DataObject) -> None:
    document = copy.deepcopy(
        data.draw(st.sampled_from([vllm(), vllm(False), guidellm(), guidellm(True), aiperf_line(0), aiperf_summary()]))
    )
    path = data.draw(st.sampled_from([path for path in _paths(document) if path]))
    node = document
    for key in path[:-1]:
        node = node[key]
    wrong = [None, "", "x", -1, 0, 1e300, True, [], {}, [[]], {"a": None}, 10**40]
    if isinstance(node, dict) and data.draw(st.booleans()):
        del node[path[-1]]
    else:
        node[path[-1]] = data.draw(st.sampled_from(wrong))
    try:
        for result in read_results(written(tmp_path, document)):
            result.run(result.scenario("any", None, None, None)).to_json()
    except MemboundError as error:
        assert "\n" not in str(error)
