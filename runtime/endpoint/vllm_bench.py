"""What does a file of `vllm bench serve --save-result` say, with `--save-detailed` of each request?

Source: vLLM, vllm/benchmarks/serve.py (commit 009e6d4a) and vllm/benchmarks/lib/endpoint_request_func.py (commit
02cfb534), of the main branch in 2026. Older files lack `start_times`, `failed` and `latencies`. `ttfts`, `itls` and
`latencies` are seconds, the summary's `_ms` milliseconds; a gap is between two events of the stream. SGLang's
bench_serving writes the same names but `e2e_latency`, with what the server said of itself under `server_info` (its
`model_path` and `tp_size`: from memory).
"""

from __future__ import annotations

from datetime import datetime
from itertools import accumulate
from typing import Any

from membound.roofline.errors import MemboundError
from membound.roofline.results.result import Distribution
from membound.roofline.results.samples import Samples
from membound.runtime.endpoint.fields import Fields
from membound.runtime.endpoint.foreign import Averages, Result, closed_loop, distribution_of, open_loop
from membound.runtime.endpoint.record import RequestRow
from membound.runtime.endpoint.stream import shown

TOOL = "vllm bench serve"
_DETAILS = ("input_lens", "output_lens", "ttfts", "itls")
_NAN = float("nan")


def is_result(given: Fields) -> bool:
    return given.has("completed", "request_throughput", "total_input_tokens")


def result(given: Fields) -> Result:
    """The run of a file, by its requests where it has them."""
    parts: dict[str, Any] = {
        "tool": TOOL,
        "duration_s": given.number("duration"),
        "arrivals": _arrivals(given),
        "model": given.text("model_id"),
        "created": _created(given.text("date")),
    }
    if (given.text("backend") or "").startswith("sglang"):
        parts |= _of_sglang(given.fields("server_info"))
    rate = given.maybe("spec_decode_acceptance_rate")
    parts["told"] = {} if rate is None else {"acceptance_rate": rate / 100}
    if not given.has(*_DETAILS):
        return Result(**parts, averages=_averages(given))
    outcomes, gaps_s = _outcomes(given)
    notes = () if given.has("start_times") else ("the file does not say when requests were sent: all are put at 0 s",)
    return Result(**parts, outcomes=outcomes, itl_s=Samples.of(gaps_s), notes=notes)


def _of_sglang(server: Fields) -> dict[str, Any]:
    tp = int(server.maybe("tp_size") or 1)
    return {
        "tool": "SGLang bench_serving",
        "profile": "sglang",
        "model": server.text("model_path"),
        "parallel": {"tp": tp} if tp > 1 else {},
    }


def _outcomes(given: Fields) -> tuple[tuple[RequestRow, ...], list[float]]:
    prompts, outputs, ttfts_s = (given.numbers(key) for key in ("input_lens", "output_lens", "ttfts"))
    gaps_s = [_gaps_of(row, index, given) for index, row in enumerate(given.items("itls"))]
    starts_s = given.numbers("start_times") if given.has("start_times") else [0.0] * len(outputs)
    errors = given.items("errors") if given.has("errors") else [""] * len(outputs)
    lengths = {len(column) for column in (prompts, outputs, ttfts_s, gaps_s, starts_s, errors)}
    if len(lengths) != 1:
        counts = " and ".join(map(str, sorted(lengths)))
        raise MemboundError(f"{given.where}: its lists of requests have {counts} items; the file may be damaged")
    began_s, rows = min(starts_s, default=0.0), []
    for i, (prompt, output, ttft_s, gaps, start_s, error) in enumerate(
        zip(prompts, outputs, ttfts_s, gaps_s, starts_s, errors, strict=True)
    ):
        at_s = start_s - began_s
        if error or not output:
            reason = shown(_last_line(str(error))) or "no token came"
            rows.append(RequestRow(i, at_s, at_s, _NAN, _NAN, int(prompt), 0, reason=reason))
            continue
        *_, last_s = accumulate(gaps, initial=at_s + ttft_s)
        rows.append(RequestRow(i, at_s, at_s, at_s + ttft_s, last_s, int(prompt), int(output)))
    return tuple(rows), [gap for row, gaps in zip(rows, gaps_s, strict=True) if not row.reason for gap in gaps]


def _gaps_of(row: Any, index: int, given: Fields) -> list[float]:
    return Fields({"gaps": row}, f"{given.where}: field 'itls', item {index}").numbers("gaps")


def _last_line(error: str) -> str:
    """Of a traceback, which the tool keeps, the line that says what happened."""
    lines = [line for line in error.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _averages(given: Fields) -> Averages:
    completed = int(given.number("completed"))
    prompts = given.maybe("num_prompts")
    failed = given.maybe("failed")
    lost = failed if failed is not None else max(0.0, prompts - completed) if prompts is not None else 0.0
    return Averages(
        completed,
        int(lost),
        given.number("total_input_tokens") / max(completed, 1),
        given.number("total_output_tokens", "total_output") / max(completed, 1),
        ttft_s=_distribution(given, "ttft"),
        tpot_s=_distribution(given, "tpot"),
        itl_s=_distribution(given, "itl"),
        e2e_s=_distribution(given, "e2el" if given.has("mean_e2el_ms") else "e2e_latency"),
    )


def _distribution(given: Fields, metric: str) -> Distribution:
    return distribution_of((given.maybe(f"{name}_{metric}_ms") for name in ("mean", "median", "p90", "p99")), 1e3)


def _arrivals(given: Fields) -> dict[str, Any] | None:
    """The rate that was asked for; without one all requests are sent at once, to as many users as there are."""
    users = given.maybe("max_concurrency")
    rate = None if given.text("request_rate") is not None else given.maybe("request_rate")
    if rate is None:
        return closed_loop(users or given.maybe("num_prompts", "completed"))
    return open_loop(rate, given.maybe("burstiness") or 1.0)


def _created(date: str | None) -> str | None:
    """Their time, which has no zone, as ISO writes it."""
    try:
        return None if date is None else datetime.strptime(date, "%Y%m%d-%H%M%S").isoformat()
    except ValueError:
        return None
