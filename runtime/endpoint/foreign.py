"""What did another tool measure at a server? Its result as a run of ours, with the scenario that it amounts to.

Read are vLLM's `vllm bench serve`, with SGLang's bench_serving, GuideLLM, AIPerf and TensorRT-LLM's `trtllm-bench`;
each has a file of its own here that says what its fields mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from membound.roofline.errors import MemboundError
from membound.roofline.results.result import Distribution, RunResult, Summary
from membound.roofline.results.samples import Samples
from membound.roofline.scenario import Scenario, Slo, parse_scenario
from membound.runtime.endpoint.fields import Fields, documents
from membound.runtime.endpoint.record import RequestRow, requests_table, run_result

UNKNOWN = "unknown"
# The engine that most of these files are of; 256 sequences at a time are its default on many devices (from memory).
_USUAL_PROFILE, _USUAL_SEATS = "vllm", 256
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
_NONE = Distribution(mean=None, p50=None, p90=None, p99=None)


@dataclass(frozen=True)
class Averages:
    """What a file says where it has no record of each request."""

    completed: int
    failed: int
    prompt_tokens: float
    output_tokens: float
    ttft_s: Distribution = _NONE
    tpot_s: Distribution = _NONE
    itl_s: Distribution = _NONE
    e2e_s: Distribution = _NONE


@dataclass(frozen=True)
class Result:
    """One run that a file holds: a record of each request, or averages alone.

    `arrivals`, `parallel` and the engine's `limits` are fields of a scenario's; `told` is what the server said of
    itself, `profile` the engine that it is taken for.
    """

    tool: str
    duration_s: float
    arrivals: dict[str, Any] | None
    outcomes: tuple[RequestRow, ...] = ()
    averages: Averages | None = None
    itl_s: Samples = field(default_factory=Samples)
    model: str | None = None
    version: str | None = None
    created: str | None = None
    told: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    profile: str = _USUAL_PROFILE
    notes: tuple[str, ...] = ()

    @property
    def requests(self) -> int:
        return len(self.outcomes) if self.averages is None else self.averages.completed + self.averages.failed

    @property
    def alike(self) -> str | None:
        """What a scenario does not know that is made of averages alone; None where the file has each request."""
        if self.averages is None:
            return None
        prompt, output = self.averages.prompt_tokens, self.averages.output_tokens
        return (
            f"the file has averages alone, so that each request is predicted with {prompt:.0f} tokens in and "
            f"{output:.0f} out: where lengths differ, so do waiting and memory; results of each request tell them"
        )

    def scenario(self, name: str, model: str | None, hardware: str | None, profile: str | None) -> Scenario:
        """What the file says was asked, as far as it does; raises MemboundError where it holds no request.

        Where the file does not say how many seats the engine had, it gets the usual number, or one for each user.
        """
        if not self.requests:
            raise MemboundError(f"{self.tool}'s result holds no request")
        prompts, outputs = self._lengths()
        arrivals = self.arrivals or {"kind": "closed_loop", "concurrency": self._most_at_a_time()}
        seats = max(_USUAL_SEATS, arrivals.get("concurrency", 0))
        return parse_scenario(
            {
                "name": re.sub(r"[^\w.-]+", "-", name).strip("-.") or "imported",
                "description": f"what {self.tool} measured",
                "model": model or self.model or UNKNOWN,
                "hardware": hardware or UNKNOWN,
                "parallel": self.parallel,
                "engine": {"profile": profile or self.profile, "max_num_seqs": seats} | self.limits,
                "repeats": 1,
                "workload": {
                    "arrivals": arrivals,
                    "requests": self.requests,
                    "prompts": {"kind": "synthetic", "tokens": prompts},
                    "output_tokens": outputs,
                },
            }
        )

    def run(self, scenario: Scenario) -> RunResult:
        """The run, as of that scenario."""
        notes = list(self.notes)
        if self.averages is not None and scenario.slo != Slo():
            notes.append("averages do not tell how many requests met the scenario's objective, so it is left out")
            scenario = scenario.model_copy(update={"slo": Slo()})
        run = run_result(
            scenario,
            requests_table(self.outcomes),
            self.itl_s,
            duration_s=self.duration_s,
            told=self.told,
            notes=[f"measured by {self.tool}" + (f" {self.version}" if self.version else ""), *notes],
            details={"endpoint": {"tool": self.tool, "model": self.model, "server": self.told}},
            versions={} if self.version is None else {self.tool: self.version},
            created=self.created,
        )
        if self.averages is None:
            return run
        summary = _summary(self.averages, self.duration_s, run.summary)
        return RunResult(run.scenario, summary, run.provenance, run.requests, run.steps, run.itl_s)

    def _lengths(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.averages is not None:
            means = (self.averages.prompt_tokens, self.averages.output_tokens)
            return _length([means[0]]), _length([means[1]])
        done = [one for one in self.outcomes if not one.reason]
        return _length([one.prompt_tokens for one in done]), _length([one.output_tokens for one in done])

    def _most_at_a_time(self) -> int:
        """The most requests that were under way at once, for files that do not say how many users there were."""
        done = [one for one in self.outcomes if not one.reason]
        moments = [(one.arrival_s, 1) for one in done] + [(one.finished_s, -1) for one in done]
        changes = [change for _, change in sorted(moments)]
        return max(1, int(np.max(np.cumsum(changes)))) if changes else 1


def read_results(path: Path) -> list[Result]:
    """The runs that a file of a benchmark tool holds; raises MemboundError with one sentence."""
    from membound.runtime.endpoint import aiperf, guidellm, trtllm_bench, vllm_bench

    results: list[Result] = []
    records: list[Fields] = []
    for document, where in documents(path, trtllm_bench.reports_in):
        given = Fields(document, where)
        if aiperf.is_record(given):
            records.append(given)
        elif guidellm.is_report(given):
            results += guidellm.results(given)
        elif aiperf.is_summary(given):
            results.append(aiperf.summary(given))
        elif vllm_bench.is_result(given):
            results.append(vllm_bench.result(given))
        elif trtllm_bench.is_report(given):
            results.append(trtllm_bench.result(given))
        else:
            raise MemboundError(
                f"{where} is no result that is known; known are those of `vllm bench serve --save-result`, SGLang's "
                "bench_serving, GuideLLM's benchmarks.json, AIPerf's profile_export.jsonl and "
                "profile_export_aiperf.json, and reports of trtllm-bench"
            )
    if records:
        results.append(aiperf.records(records))
    if not results:
        raise MemboundError(f"results file '{path}' holds no benchmark")
    for number, result in enumerate(results, start=1):
        if not result.duration_s > 0:
            raise MemboundError(
                f"results file '{path}': benchmark {number} took {result.duration_s:g} s, in which nothing is served; "
                "the file may be damaged"
            )
    return results


def closed_loop(users: float | None) -> dict[str, Any] | None:
    return {"kind": "closed_loop", "concurrency": int(users)} if users and users >= 1 else None


def open_loop(rate_rps: float, burstiness: float = 1.0) -> dict[str, Any] | None:
    """Poisson, or gamma of that shape, whose gaps then deviate by 1 / sqrt(shape) of their mean."""
    if not rate_rps > 0:
        return None
    if burstiness == 1.0 or not burstiness > 0:
        return {"kind": "poisson", "rate_rps": rate_rps}
    return {"kind": "gamma", "rate_rps": rate_rps, "cv": burstiness**-0.5}


def distribution_of(values: Iterable[float | None], per_s: float) -> Distribution:
    """A distribution in seconds from mean, p50, p90 and p99, of which `per_s` make a second; None where one lacks."""
    mean, p50, p90, p99 = (None if value is None else value / per_s for value in values)
    return Distribution(mean=mean, p50=p50, p90=p90, p99=p99)


def _length(tokens: Sequence[float]) -> dict[str, Any]:
    """Lengths as a scenario says them: one, or the quantiles of what was seen."""
    seen = np.maximum(np.round(np.array(tokens or [1.0])), 1)
    if seen.min() == seen.max():
        return {"kind": "fixed", "tokens": int(seen[0])}
    quantiles = np.round(np.quantile(seen, _SHARES)).astype(int).tolist()
    return {"kind": "quantiles", "shares": list(_SHARES), "tokens": quantiles}


def _summary(averages: Averages, duration_s: float, empty: Summary) -> Summary:
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    requests = averages.completed + averages.failed
    output = averages.completed * averages.output_tokens
    total = output + averages.completed * averages.prompt_tokens
    return empty.model_copy(
        update={
            "requests": requests,
            "completed": averages.completed,
            "failed": averages.failed,
            "rejected": 0,
            "duration_s": duration_s,
            "output_tokens_per_s": output * per_s,
            "total_tokens_per_s": total * per_s,
            "requests_per_s": averages.completed * per_s,
            "goodput_rps": averages.completed * per_s,
            "slo_attainment": averages.completed / requests if requests else 0.0,
            "ttft_s": averages.ttft_s,
            "tpot_s": averages.tpot_s,
            "itl_s": averages.itl_s,
            "e2e_s": averages.e2e_s,
        }
    )
