"""What did a run come to? The same record for a simulated, a measured and an endpoint's run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from membound.roofline.hardware.calibration import one_state
from membound.roofline.results.cluster_summary import ClusterSummary
from membound.roofline.results.samples import Samples
from membound.roofline.scenario import Scenario

Column = NDArray[Any]
BOUNDS = ("memory_weights", "memory_kv", "compute", "link", "overhead", "idle")


class Distribution(BaseModel):
    """Mean and percentiles of a latency in seconds; all None where nothing was sampled."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, samples_s: NDArray[np.float64]) -> Distribution:
        if len(samples_s) == 0:
            return cls(mean=None, p50=None, p90=None, p99=None)
        p50, p90, p99 = np.percentile(samples_s, (50, 90, 99))
        return cls(mean=float(np.mean(samples_s)), p50=float(p50), p90=float(p90), p99=float(p99))

    @classmethod
    def of_samples(cls, samples: Samples) -> Distribution:
        p50, p90, p99 = samples.percentiles((50, 90, 99))
        return cls(mean=samples.mean, p50=p50, p90=p90, p99=p99)


class Summary(BaseModel):
    """The metrics of a run, defined in METRICS.md beside this file.

    Of a server whose steps nobody saw, what only steps tell is None, and no bound has a share.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests: int
    completed: int
    rejected: int
    failed: int = 0
    duration_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution
    goodput_rps: float
    slo_attainment: float
    kv_utilization: float | None
    kv_waste: float | None = None
    prefix_hit_rate: float | None = None
    preemptions: int | None
    tokens_per_step: float | None
    acceptance_rate: float | None
    bottleneck_share: dict[str, float]
    energy_j_per_token: float | None
    cost_usd_per_million_tokens: float | None


MOST_ELSEWHERE = 0.2  # of a run's turns move its mean by no more than runs of one state differ


class MemoryRates(BaseModel):
    """Bytes/s that a plain read of memory gave before and after a run, and when the machine was calibrated.

    Of a run in turns, the medians before and after them, and which share of them was `elsewhere`, in another state.
    """

    model_config = ConfigDict(frozen=True)

    before: float
    after: float
    calibrated: float
    elsewhere: float = 0.0

    @property
    def as_calibrated(self) -> bool:
        """Whether the run had the memory that its prediction counts on."""
        here = one_state(self.before, self.calibrated) and one_state(self.after, self.calibrated)
        return here and self.elsewhere <= MOST_ELSEWHERE


class Provenance(BaseModel):
    """Who made the numbers, when, on what, in which state.

    `stalls` counts how often other programs held up the run's threads: a run with many was disturbed. `memory` says
    what memory gave, where the calibration knows what it gave then. Where a part of the engine was `emulated`, the
    tokens are its own and the times are not.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    producer: Literal["simulator", "runtime", "endpoint"]
    created: str
    hardware: str
    versions: dict[str, str] = {}
    stalls: int = 0
    memory: MemoryRates | None = None
    emulated: bool = False
    notes: list[str] = []


@dataclass(frozen=True)
class RunResult:
    """A scenario's outcome: the summary, and tables with one entry a request, a step, an inter-token gap.

    `requests`: id, arrival_s, admitted_s, first_token_s, finished_s (NaN where it did not happen), prompt_tokens,
    output_tokens, preemptions, cached_tokens of the prompt, service_class, completed. `steps`: start_s, time_s, how
    many `steps` a row stands for, drafted, accepted, emitted, moved_blocks, cached_tokens, all of them summed over
    these steps; blocks_used and held_tokens, their mean over time; the sums of `StepShape` of the mean step, and those
    within each window that the model's layers have (`columns_within`); and the share of each bound. `itl_s`: gaps
    between the moments at which a request's tokens came. With a `cluster`, both tables have the number of the `replica`
    (-1 for a request that reached none), and requests how many `retries` they had and whether they `failed`.
    `acceptance_by_position` is the share of drafts that reach a position of which the guess there was accepted, with
    all before it.
    """

    scenario: Scenario
    summary: Summary
    provenance: Provenance
    requests: dict[str, Column]
    steps: dict[str, Column]
    itl_s: Samples
    outputs: dict[int, list[int]] = field(default_factory=dict)
    cluster: ClusterSummary | None = None
    acceptance_by_position: tuple[float, ...] = ()

    def __repr__(self) -> str:
        """One line, as a notebook shows it: the tables have an entry a request and a step."""
        done = self.summary
        tpot = "" if done.tpot_s.mean is None else f", TPOT {done.tpot_s.mean:.3g} s"
        return (
            f"<RunResult: {self.scenario.name} by {self.provenance.producer}, {done.completed} of {done.requests} "
            f"requests served, {done.output_tokens_per_s:.4g} output tok/s{tpot}>"
        )

    def to_json(self) -> dict[str, Any]:
        """What `membound simulate --json` and `membound measure --json` print."""
        document: dict[str, Any] = {
            "scenario": self.scenario.model_dump(mode="json"),
            "summary": self.summary.model_dump(mode="json"),
            "provenance": self.provenance.model_dump(mode="json"),
        }
        if self.acceptance_by_position:
            document["acceptance_by_position"] = list(self.acceptance_by_position)
        from membound.roofline.results.classes import summaries_of_classes  # which is made of metrics of results

        if classes := summaries_of_classes(self.scenario, self.requests):
            document["classes"] = [one.model_dump(mode="json") for one in classes]
        return document if self.cluster is None else document | {"cluster": self.cluster.model_dump(mode="json")}
