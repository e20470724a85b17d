"""What does GuideLLM's benchmarks.json say of each of its benchmarks?

Source: GuideLLM, src/guidellm/schemas/base/request_stats.py (commit 31c74ea2) and info.py (commit 1053a039), of 2026,
and src/guidellm/benchmark/benchmark.py (commit 47ce2924) of version 0.2, whose requests have their times beside them
instead of in `info.timings`. Times are seconds since the epoch, of latencies only `request_latency` is seconds. First
and last token are recorded, gaps are not. `args` may hold a key and is not kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from membound.roofline.errors import MemboundError
from membound.roofline.results.result import Distribution
from membound.runtime.endpoint.fields import Fields
from membound.runtime.endpoint.foreign import Averages, Result, closed_loop, distribution_of, open_loop
from membound.runtime.endpoint.record import RequestRow
from membound.runtime.endpoint.stream import shown

TOOL = "GuideLLM"
_NAN = float("nan")


def is_report(given: Fields) -> bool:
    return given.has("benchmarks")


def results(given: Fields) -> Iterator[Result]:
    """A run for each benchmark of the report, such as each rate of a sweep."""
    args = given.fields("args") if given.has("args") else None
    version = given.fields("metadata").text("guidellm_version") if given.has("metadata") else None
    for index, document in enumerate(given.items("benchmarks")):
        benchmark = Fields(document, f"{given.where}, benchmark {index + 1}")
        yield _result(benchmark, args, version)


def _result(benchmark: Fields, args: Fields | None, version: str | None) -> Result:
    metrics, requests = benchmark.fields("metrics"), benchmark.fields("requests")
    done = requests.items("successful") if requests.has("successful") else []
    lost = requests.items("errored") if requests.has("errored") else []
    cut = len(requests.items("incomplete")) if requests.has("incomplete") else 0
    totals = (metrics if metrics.has("request_totals") else benchmark).fields("request_totals")
    notes = ["GuideLLM records no gaps between tokens, so there are no inter-token latencies"]
    if cut := int(totals.maybe("incomplete") or cut):
        notes.append(f"{cut} requests that were cut off at the end of the benchmark are left out")
    parts: dict[str, Any] = {"tool": TOOL, "version": version, "arrivals": _arrivals(benchmark)}
    parts |= {"duration_s": _duration_s(benchmark), "model": _model(benchmark, args)}
    completed = totals.maybe("successful")
    if done and (completed is None or completed == len(done)):
        rows = [_outcome(Fields(row, f"{requests.where}, successful {i}"), i) for i, row in enumerate(done)]
        rows += [_lost(Fields(row, f"{requests.where}, errored {i}"), len(done) + i) for i, row in enumerate(lost)]
        began_s = min(row.arrival_s for row in rows)
        return Result(**parts, outcomes=tuple(_since(row, began_s) for row in rows), notes=tuple(notes))
    if completed is None:
        raise MemboundError(f"{benchmark.where} has neither requests nor their total, so it holds no result")
    if done:
        notes.append(f"the file holds {len(done)} of {completed:.0f} requests, so its averages are taken")
    averages = _averages(metrics, int(completed), int(totals.maybe("errored") or 0))
    return Result(**parts, averages=averages, notes=tuple(notes))


def _outcome(row: Fields, index: int) -> RequestRow:
    timings = row.fields("info").fields("timings") if row.has("info") else row
    start_s = _first(timings.maybe("request_start", "start_time"), row.maybe("request_start_time", "start_time"))
    end_s = _first(timings.maybe("request_end", "end_time"), row.maybe("request_end_time", "end_time"))
    if start_s is None or end_s is None:
        raise MemboundError(f"{row.where}: neither its times nor 'request_start_time' and 'request_end_time' are there")
    first_s = timings.maybe("first_token_iteration", "first_token_time")
    ttft_ms = row.maybe("time_to_first_token_ms")
    if first_s is None:
        first_s = end_s if ttft_ms is None else start_s + ttft_ms / 1e3
    last_s = _first(timings.maybe("last_token_iteration", "last_token_time"), end_s)
    assert last_s is not None, "a request has an end"
    prompt = _first(row.maybe("prompt_tokens"), row.fields("input_metrics").maybe("text_tokens", "total_tokens"))
    output = _first(row.maybe("output_tokens"), row.fields("output_metrics").maybe("text_tokens", "total_tokens"))
    if output is None:
        raise MemboundError(f"{row.where}: field 'output_tokens' is missing")
    return RequestRow(index, start_s, start_s, first_s, max(first_s, last_s), int(prompt or 0), int(output))


def _lost(row: Fields, index: int) -> RequestRow:
    info = row.fields("info") if row.has("info") else row
    timings = info.fields("timings") if info.has("timings") else row
    start_s = _first(timings.maybe("request_start", "start_time", "resolve_start"), row.maybe("request_start_time"))
    reason = shown(info.text("error") or row.text("error") or "") or "failed, and the file does not say why"
    at_s = _NAN if start_s is None else start_s
    return RequestRow(index, at_s, at_s, _NAN, _NAN, int(row.maybe("prompt_tokens") or 0), 0, reason=reason)


def _since(row: RequestRow, began_s: float) -> RequestRow:
    """Seconds of the run instead of the epoch; what was never sent counts from the beginning."""
    arrival_s = row.arrival_s - began_s if row.arrival_s == row.arrival_s else 0.0
    times = (row.sent_s - began_s, row.first_token_s - began_s, row.finished_s - began_s)
    return RequestRow(row.id, arrival_s, *times, row.prompt_tokens, row.output_tokens, reason=row.reason)


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _duration_s(benchmark: Fields) -> float:
    told = benchmark.maybe("duration")
    if told is not None:
        return told
    for given in (benchmark, benchmark.fields("scheduler_metrics"), benchmark.fields("run_stats")):
        begin_s = given.maybe("measure_start_time", "start_time")
        end_s = given.maybe("measure_end_time", "end_time")
        if begin_s is not None and end_s is not None and end_s > begin_s:
            return end_s - begin_s
    raise MemboundError(f"{benchmark.where}: field 'duration' is missing")


def _model(benchmark: Fields, args: Fields | None) -> str | None:
    for given in (args, benchmark.fields("config").fields("backend"), benchmark.fields("worker")):
        if given is not None and (name := given.text("model", "backend_model")):
            return name
    found = None if args is None else args.find("model")
    return found if isinstance(found, str) else None


def _arrivals(benchmark: Fields) -> dict[str, Any] | None:
    settings = benchmark.fields("config") if benchmark.has("config") else benchmark.fields("args")
    strategy = settings.fields("strategy")
    match strategy.text("type_", "kind"):
        case "synchronous":
            return closed_loop(1)
        case "concurrent":
            return closed_loop(strategy.maybe("streams", "max_concurrency"))
        case "constant":
            rate = strategy.maybe("rate")
            return {"kind": "constant", "rate_rps": rate} if rate else None
        case "poisson":
            return open_loop(strategy.maybe("rate") or 0.0)
        case _:
            return closed_loop(strategy.maybe("streams", "max_concurrency"))


def _averages(metrics: Fields, completed: int, failed: int) -> Averages:
    return Averages(
        completed,
        failed,
        _successful(metrics, "prompt_token_count").number("mean"),
        _successful(metrics, "output_token_count").number("mean"),
        _distribution(metrics, "time_to_first_token_ms", 1e3),
        _distribution(metrics, "inter_token_latency_ms", 1e3),  # of each request its mean: a time per output token
        e2e_s=_distribution(metrics, "request_latency", 1.0),
    )


def _successful(metrics: Fields, name: str) -> Fields:
    return metrics.fields(name).fields("successful")


def _distribution(metrics: Fields, name: str, per_s: float) -> Distribution:
    given = _successful(metrics, name)
    percentiles = given.fields("percentiles")
    values = (given.maybe("mean"), given.maybe("median"), percentiles.maybe("p90"), percentiles.maybe("p99"))
    return distribution_of(values, per_s)
