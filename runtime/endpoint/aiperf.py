"""What do AIPerf's exports say: profile_export.jsonl of each request, profile_export_aiperf.json of all?

Source: AIPerf, docs/tutorials/working-with-profile-exports.md (commit 13992dbd) and
docs/reference/json-export-schema.md (commit 1554b478, schema 1.5), of 2026. A value stands beside its unit, which alone
says what it means. A chunk is an event of the stream; `inter_token_latency` is a request's mean.
"""

from __future__ import annotations

from typing import Any

from membound.roofline.errors import MemboundError
from membound.roofline.results.result import Distribution
from membound.roofline.results.samples import Samples
from membound.runtime.endpoint.fields import Fields
from membound.runtime.endpoint.foreign import Averages, Result, closed_loop, distribution_of, open_loop
from membound.runtime.endpoint.record import RequestRow
from membound.runtime.endpoint.stream import shown

TOOL = "AIPerf"
_NAN = float("nan")
_PER_S = {"ns": 1e9, "us": 1e6, "µs": 1e6, "ms": 1e3, "s": 1.0, "sec": 1.0, "seconds": 1.0}


def is_record(given: Fields) -> bool:
    return given.has("metadata") and given.has("metrics") and given.fields("metadata").has("request_start_ns")


def is_summary(given: Fields) -> bool:
    return given.has("request_latency", "request_throughput") and not given.has("completed")


def records(lines: list[Fields]) -> Result:
    """The run of a file of requests; those of the warm-up are left out."""
    kept = [line for line in lines if line.fields("metadata").text("benchmark_phase") != "warmup"]
    if not kept:
        raise MemboundError(f"{lines[0].where.partition(', line')[0]} holds the warm-up alone, so no result")
    # Nanoseconds since the epoch are more digits than a float has: they are subtracted as whole numbers.
    began_ns = min(_start_ns(line) for line in kept)
    rows, gaps_s, end_s = [], list[float](), 0.0
    for index, line in enumerate(kept):
        row, gaps = _outcome(line, index, (_start_ns(line) - began_ns) / 1e9)
        rows.append(row)
        gaps_s += gaps
        end_s = max(end_s, (line.fields("metadata").whole("request_end_ns") - began_ns) / 1e9)
    left = len(lines) - len(kept)
    notes = (f"{left} requests of the warm-up are left out",) if left else ()
    return Result(TOOL, end_s, None, tuple(rows), itl_s=Samples.of(gaps_s), notes=notes)


def _start_ns(line: Fields) -> int:
    return line.fields("metadata").whole("request_start_ns")


def _outcome(line: Fields, index: int, at_s: float) -> tuple[RequestRow, list[float]]:
    metrics, metadata = line.fields("metrics"), line.fields("metadata")
    prompt = int(_count(metrics, "input_sequence_length", "error_isl") or 0)
    if line.has("error") or metadata.find("cancellation_time_ns") is not None:
        error = line.fields("error")
        reason = shown(error.text("message", "type") or "") or "cancelled by the tool"
        return RequestRow(index, at_s, at_s, _NAN, _NAN, prompt, 0, reason=reason), []
    latency_s = _seconds(metrics, "request_latency")
    if latency_s is None:
        raise MemboundError(f"{line.where}: field 'request_latency' is missing")
    ttft_s = _seconds(metrics, "time_to_first_token")
    tokens = int(_count(metrics, "output_sequence_length", "output_token_count") or 0)
    first_s = at_s + (latency_s if ttft_s is None else min(ttft_s, latency_s))
    gaps = metrics.fields("inter_chunk_latency")
    gaps_s = [gap / _per_s(gaps) for gap in gaps.numbers("value")] if gaps.has("value") else []
    return RequestRow(index, at_s, at_s, first_s, at_s + latency_s, prompt, tokens), gaps_s


def summary(given: Fields) -> Result:
    """The run of a file of averages."""
    config = given.fields("input_config")
    rate, users = config.find("request_rate"), config.find("concurrency")
    arrivals = open_loop(rate) if isinstance(rate, float) and rate > 0 else None
    if arrivals is None:
        arrivals = closed_loop(users if isinstance(users, float) else None)
    completed = int(given.fields("request_count").number("avg"))
    duration_s = _statistic(given, "benchmark_duration", "avg")
    if duration_s is None:
        duration_s = completed / given.fields("request_throughput").number("avg")
    averages = Averages(
        completed,
        int(given.fields("error_request_count").maybe("avg") or 0),
        given.fields("input_sequence_length").maybe("avg") or 0.0,
        given.fields("output_sequence_length").maybe("avg") or given.fields("output_token_count").number("avg"),
        _distribution(given, "time_to_first_token"),
        _distribution(given, "inter_token_latency"),  # a request's mean: a time per output token
        _distribution(given, "inter_chunk_latency"),
        _distribution(given, "request_latency"),
    )
    version = given.text("aiperf_version")
    return Result(
        TOOL,
        duration_s,
        arrivals,
        averages=averages,
        model=_model(config),
        version=version,
        created=given.text("start_time"),
    )


def _model(config: Fields) -> str | None:
    """The first of the models: a list of names, or of mappings with a name, under `endpoint` or `models`."""
    for given, key in ((config.fields("endpoint"), "model_names"), (config.fields("models"), "items")):
        if given.has(key) and (listed := given.items(key)):
            first: Any = listed[0]
            name = first.get("name") if isinstance(first, dict) else first
            return name if isinstance(name, str) else None
    return None


def _count(metrics: Fields, *names: str) -> float | None:
    return next((metrics.fields(name).number("value") for name in names if metrics.has(name)), None)


def _seconds(metrics: Fields, name: str) -> float | None:
    given = metrics.fields(name)
    return given.number("value") / _per_s(given) if given.has("value") else None


def _statistic(given: Fields, name: str, statistic: str) -> float | None:
    metric = given.fields(name)
    value = metric.maybe(statistic)
    return None if value is None else value / _per_s(metric)


def _distribution(given: Fields, name: str) -> Distribution:
    metric = given.fields(name)
    per_s = _per_s(metric) if metric.has("avg") else 1.0
    return distribution_of((metric.maybe(key) for key in ("avg", "p50", "p90", "p99")), per_s)


def _per_s(metric: Fields) -> float:
    unit = metric.text("unit") or ""
    if unit not in _PER_S:
        raise MemboundError(f"{metric.where}: field 'unit' is '{shown(unit)}'; it must be one of {', '.join(_PER_S)}")
    return _PER_S[unit]
