"""What does a report of `trtllm-bench` say, written with `--report_json` or as it stands in a log?

Source: TensorRT-LLM, tensorrt_llm/bench/dataclasses/reporting.py (commit 02499765), of 2026. Reports have averages and
percentiles alone, in milliseconds; a time per output token leaves out the first. The engine runs without a server, and
all requests are there from the start, at most `--concurrency` of them under way, which no report says.
"""

from __future__ import annotations

import math
import re
from typing import Any

from membound.roofline.errors import MemboundError
from membound.roofline.results.result import Distribution
from membound.roofline.times.engines import profile_of_engine
from membound.runtime.endpoint.fields import Fields
from membound.runtime.endpoint.foreign import Averages, Result, closed_loop, distribution_of
from membound.runtime.endpoint.stream import shown

TOOL = "trtllm-bench"
_OVERVIEW = "= PERFORMANCE OVERVIEW"
_NUMBER = r"([\d.]+(?:[eE][+-]?\d+)?)"
# Where a line of the log has the value of which field.
_LINES = {
    ("engine", "model"): r"Model:[ \t]+(\S+)",
    ("engine", "version"): r"TensorRT[- ]LLM Version:[ \t]+(\S+)",
    ("engine", "kv_cache_dtype"): r"KV Cache Dtype:[ \t]+(\S+)",
    ("engine", "quantization"): r"Quantization:[ \t]+(\S+)",
    ("world_info", "tp_size"): rf"TP Size:[ \t]+{_NUMBER}",
    ("world_info", "pp_size"): rf"PP Size:[ \t]+{_NUMBER}",
    ("world_info", "ep_size"): rf"EP Size:[ \t]+{_NUMBER}",
    ("world_info", "max_batch_size"): rf"Max Runtime Batch Size:[ \t]+{_NUMBER}",
    ("world_info", "max_num_tokens"): rf"Max Runtime Tokens:[ \t]+{_NUMBER}",
    ("request_info", "num_requests"): rf"Number of requests:[ \t]+{_NUMBER}",
    ("request_info", "avg_num_concurrent_requests"): rf"Number of concurrent requests:[ \t]+{_NUMBER}",
    ("request_info", "avg_input_length"): rf"Average Input Length \(tokens\):[ \t]+{_NUMBER}",
    ("request_info", "avg_output_length"): rf"Average Output Length \(tokens\):[ \t]+{_NUMBER}",
    ("performance", "total_latency_ms"): rf"Total Latency \(ms\):[ \t]+{_NUMBER}",
    ("performance", "avg_request_latency_ms"): rf"Average request latency \(ms\):[ \t]+{_NUMBER}",
}
_TEXTS = ("model", "version", "kv_cache_dtype", "quantization")
# Percentiles by the mark of their lines, and the field that a report has them in.
_BREAKDOWNS = {
    "TPOT": ("streaming_metrics", "tpot_percentiles"),
    "TTFT": ("streaming_metrics", "ttft_percentiles"),
    "Latency": ("performance", "request_latency_percentiles_ms"),
}


def is_report(given: Fields) -> bool:
    return given.has("performance", "request_info")


def reports_in(log: str) -> list[dict[str, Any]]:
    """The reports that a log has, as `--report_json` writes them; none where it is the log of something else."""
    starts = [match.start() for match in re.finditer(r"= (?:PYTORCH BACKEND|ENGINE DETAILS|REQUEST DETAILS)", log)]
    reports: list[dict[str, Any]] = []
    for overview in (match.start() for match in re.finditer(_OVERVIEW, log)):
        # A report begins with its engine, or where that is cut off with its requests.
        before = [start for start in starts if start < overview and log.find(_OVERVIEW, start) == overview]
        after = log.find("= DATASET DETAILS", overview)
        reports.append(_parsed(log[min(before, default=overview) : after if after >= 0 else len(log)]))
    return [report for report in reports if report.get("request_info")]


def _parsed(text: str) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for (part, field), pattern in _LINES.items():
        if found := re.search(pattern, text):
            report.setdefault(part, {})[field] = found[1] if field in _TEXTS else float(found[1])
    for mark, (part, field) in _BREAKDOWNS.items():
        listed = re.findall(rf"\[{mark}\] (\w+)\s*: {_NUMBER}", text)
        if listed:
            report.setdefault(part, {})[field] = {name.lower(): float(value) for name, value in listed}
    return report


def result(given: Fields) -> Result:
    """The run of a report."""
    engine, world, requests = (given.fields(part) for part in ("engine", "world_info", "request_info"))
    performance, streaming = given.fields("performance"), given.fields("streaming_metrics")
    completed, at_a_time = int(requests.number("num_requests")), requests.maybe("avg_num_concurrent_requests")
    if completed < 1:
        raise MemboundError(f"{given.where}: field 'num_requests' is {completed}; it must be 1 or more")
    averages = Averages(
        completed,
        0,
        requests.number("avg_input_length"),
        requests.number("avg_output_length"),
        _distribution(streaming.fields("ttft_percentiles"), streaming.maybe("avg_ttft_ms")),
        _distribution(streaming.fields("tpot_percentiles"), streaming.maybe("avg_tpot_ms")),
        e2e_s=_distribution(
            performance.fields("request_latency_percentiles_ms"), performance.maybe("avg_request_latency_ms")
        ),
    )
    version = engine.text("version")
    degrees = {name: int(world.maybe(f"{name}_size") or 1) for name in ("tp", "pp", "ep")}
    limits = {"max_num_seqs": world.maybe("max_batch_size"), "max_batched_tokens": world.maybe("max_num_tokens")}
    return Result(
        TOOL,
        performance.number("total_latency_ms") / 1e3,
        closed_loop(_users(completed, at_a_time)),
        averages=averages,
        model=engine.text("model"),
        version=version,
        parallel={name: degree for name, degree in degrees.items() if degree > 1},
        limits={name: int(limit) for name, limit in limits.items() if limit},
        profile=profile_of_engine("tensorrt-llm", version or "", offline=True).name,
        notes=tuple(_said(engine)),
    )


def _users(requests: int, at_a_time: float | None) -> int | None:
    """How many requests are under way at once, where so many are on average.

    Of a run without a bound at least half are, as all wait from the start; under a bound the average is near it.
    """
    if at_a_time is None:
        return None
    return requests if at_a_time > requests / 2 else math.ceil(at_a_time)


def _said(engine: Fields) -> list[str]:
    notes = ["the report does not say its --concurrency: as many requests as on average are taken, or all if half are"]
    formats = {"weights": engine.text("quantization"), "the KV cache": engine.text("kv_cache_dtype")}
    named = [f"{shown(format)} of {part}" for part, format in formats.items() if format and format != "None"]
    if named:
        notes.append(f"the report names {' and '.join(named)}: give techniques where the model's name does not say so")
    return notes


def _distribution(percentiles: Fields, mean_ms: float | None) -> Distribution:
    average = percentiles.maybe("average")
    mean = mean_ms if average is None else average
    return distribution_of((mean, *(percentiles.maybe(key) for key in ("p50", "p90", "p99"))), 1e3)
