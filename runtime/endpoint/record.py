"""What do the answers of a server come to? The same record as of any run, without what nobody saw.

The steps of a server are its own: the table of steps is empty, and what only steps tell is None, unless the server's
metrics say it of this run alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import numpy as np

from membound.roofline.results.metrics import summarize
from membound.roofline.results.result import BOUNDS, Column, Provenance, RunResult, Summary
from membound.roofline.results.samples import Samples
from membound.roofline.scenario import Scenario
from membound.runtime.endpoint.drive import LATE_S, Answer
from membound.simulator.scheduling.recorder import COUNTED_COLUMNS

_NAN = float("nan")
_MOST_REASONS = 5


@dataclass(frozen=True)
class RequestRow:
    """One request as a row: its moments in seconds of the run, NaN where they did not come, and why it failed."""

    id: int
    arrival_s: float
    sent_s: float
    first_token_s: float
    finished_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: float = _NAN
    reason: str = ""

    @classmethod
    def of(cls, answer: Answer) -> RequestRow:
        request, reply = answer.request, answer.reply
        if reply is None:
            return cls(request.id, request.arrival_s, _NAN, _NAN, _NAN, request.prompt_tokens, 0, reason=answer.reason)
        return cls(
            request.id,
            request.arrival_s,
            reply.sent_s,
            reply.moments_s[0],
            reply.moments_s[-1],
            request.prompt_tokens if reply.prompt_tokens is None else reply.prompt_tokens,
            reply.tokens,
            _NAN if reply.cached_tokens is None else float(reply.cached_tokens),
        )


def requests_table(outcomes: Iterable[RequestRow]) -> dict[str, Column]:
    """The table of requests in order of their ids; when the server admitted them nobody saw."""
    rows = sorted(outcomes, key=lambda row: row.id)
    floats = ("arrival_s", "sent_s", "first_token_s", "finished_s", "cached_tokens")
    table: dict[str, Column] = {
        name: np.array([getattr(row, name) for row in rows], dtype=np.float64) for name in floats
    }
    for name in ("id", "prompt_tokens", "output_tokens"):
        table[name] = np.array([getattr(row, name) for row in rows], dtype=np.int64)
    nothing = np.zeros(len(rows), dtype=np.int64)
    failed = np.array([bool(row.reason) for row in rows], dtype=bool)
    table |= {"admitted_s": np.full(len(rows), _NAN), "preemptions": nothing, "service_class": nothing}
    table |= {"failed": failed, "completed": ~failed, "reason": np.array([row.reason for row in rows], dtype=object)}
    return table


def no_steps() -> dict[str, Column]:
    """The table of steps of an engine whose steps nobody saw."""
    return {name: np.zeros(0) for name in (*COUNTED_COLUMNS, *BOUNDS)}


def summary_of(
    requests: dict[str, Column], itl_s: Samples, scenario: Scenario, duration_s: float, told: dict[str, Any]
) -> Summary:
    """The summary, with what the server `told` of its steps and None for the rest."""
    summary = summarize(requests, no_steps(), itl_s, slo=scenario.slo, duration_s=duration_s, idle_s=0.0, num_blocks=1)
    preemptions = told.get("preemptions")
    return summary.model_copy(
        update={
            "kv_utilization": told.get("kv_usage_mean"),
            "preemptions": None if preemptions is None else int(preemptions),
            "tokens_per_step": told.get("tokens_per_step"),
            "acceptance_rate": told.get("acceptance_rate"),
            "prefix_hit_rate": told.get("prefix_hit_rate") or summary.prefix_hit_rate,
            "bottleneck_share": {},
        }
    )


def gaps_s(answers: Iterable[Answer]) -> Samples:
    """Each gap between two moments at which tokens of a request came."""
    replies = (answer.reply for answer in answers if answer.reply is not None)
    return Samples.of([later - earlier for reply in replies for earlier, later in pairwise(reply.moments_s)])


def run_result(
    scenario: Scenario,
    requests: dict[str, Column],
    itl_s: Samples,
    *,
    duration_s: float,
    told: dict[str, Any],
    notes: list[str],
    details: dict[str, Any],
    versions: dict[str, str],
    created: str | None = None,
    stalls: int = 0,
) -> RunResult:
    """The run of a server that took `duration_s`; `details` say which server, and how it was asked."""
    provenance = Provenance(
        producer="endpoint",
        created=created or datetime.now(UTC).isoformat(timespec="seconds"),
        hardware=f"{scenario.hardware}, by the scenario",
        versions=versions,
        stalls=stalls,
        notes=[*notes, *failure_notes(requests), "the engine's steps were not seen, so no bounds are attributed"],
        **details,
    )
    summary = summary_of(requests, itl_s, scenario, duration_s, told)
    return RunResult(scenario, summary, provenance, requests, no_steps(), itl_s)


def failure_notes(requests: dict[str, Column]) -> Iterator[str]:
    """Why requests failed, the usual reasons first."""
    reasons = Counter(reason for reason in requests["reason"].tolist() if reason)
    for reason, count in reasons.most_common(_MOST_REASONS):
        yield f"{count} of {len(requests['id'])} requests failed: {reason}"
    if len(reasons) > _MOST_REASONS:
        rest = sum(count for _, count in reasons.most_common()[_MOST_REASONS:])
        yield f"{rest} more failed for {len(reasons) - _MOST_REASONS} other reasons, in the table of requests"


def lateness_notes(requests: dict[str, Column], delays_s: list[float]) -> Iterator[str]:
    """How much of the times is the client's own."""
    late_s = requests["sent_s"] - requests["arrival_s"]
    late_s = late_s[np.isfinite(late_s)]
    sent = f"requests were sent {1e3 * float(np.percentile(late_s, 99)):.1f} ms late (p99)" if len(late_s) else ""
    own = f"the client's own delay was {1e3 * float(np.percentile(delays_s, 99)):.1f} ms (p99)" if delays_s else ""
    if sent or own:
        yield ", ".join(part for part in (sent, own) if part)
    if delays_s and float(np.mean(np.array(delays_s) > LATE_S)) > 0.1:
        yield (
            f"the client was more than {1e3 * LATE_S:.0f} ms late in a tenth of the time: its times are partly its "
            "own; use fewer users, a faster machine, or several"
        )
