"""Does measurement agree with prediction, technique by technique?

A comparison joins numbers of runs of the same scenario and knows nothing of who produced them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from membound.roofline.errors import MemboundError
from membound.roofline.results.result import RunResult, Summary
from membound.roofline.scenario.variants import Variant
from membound.roofline.techniques import GainMetric

Verdict = Literal["gain", "loss", "no difference", "not measured", "emulated"]

UNITS: dict[GainMetric, str] = {"tpot_s": "s", "output_tokens_per_s": "tokens/s"}


class Quality(BaseModel):
    """The price of a lossy technique, against the unmodified model on the same texts.

    `text` says on which text the perplexities with and without the technique were measured. Of a technique of the KV
    cache `recall` says which share of questions about a text was answered without and with it: the question was in
    sight when the text was read (`visible`), came after it (`hidden`), or after another one (`reused`). Where a cache
    keeps or reads at most `budget` tokens, what was judged came behind `context` ones.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kl_nats: float
    top1_agreement: float
    tokens: int
    against: str
    perplexity: float | None = None
    perplexity_before: float | None = None
    text: str | None = None
    recall: dict[str, tuple[float, float]] | None = None
    context: int | None = None
    budget: int | None = None

    @property
    def exceeded(self) -> bool:
        """Whether there was more than a budget has room for, so that a price could show."""
        return self.budget is None or self.context is None or self.context > self.budget


class Comparison(BaseModel):
    """One row: a technique (or `baseline`) at one point of the sweep, predicted and measured.

    For the baseline, predicted and measured are its decode TPOT in seconds; for a technique they are gains over the
    named baseline, above 1 is better. `spread` is half the range of the repeats; `error` is predicted / measured - 1.
    `same_outputs` is the share of greedy requests that got the tokens that they got from the baseline.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    technique: str
    baseline: str
    metric: GainMetric
    unit: str
    point: dict[str, Any]
    predicted: float
    low: float
    high: float
    measured: float | None
    spread: float | None
    error: float | None
    verdict: Verdict
    lossless: bool
    quality: Quality | None
    bottleneck_before: str
    bottleneck_after: str
    samples: list[float]
    acceptance_rate_predicted: float | None = None
    acceptance_rate_measured: float | None = None
    acceptance_by_position: tuple[float, ...] | None = None
    same_outputs: float | None = None
    conditions: str


def metric_value(summary: Summary, metric: GainMetric) -> float:
    """A run's value of a gain metric: the mean TPOT in seconds, or output tokens a second.

    Raises MemboundError where the run has none.
    """
    if metric == "tpot_s":
        if summary.tpot_s.mean is None:
            raise MemboundError(
                "no request emitted two tokens, so there is no time per output token to compare; "
                "make workload.output_tokens longer, and engine.num_blocks large enough for the requests"
            )
        return summary.tpot_s.mean
    return summary.output_tokens_per_s


def gain(baseline: Summary, technique: Summary, metric: GainMetric) -> float:
    """How many times better `technique` is than `baseline`: a time falls, a rate rises."""
    before, after = metric_value(baseline, metric), metric_value(technique, metric)
    return before / after if metric == "tpot_s" else after / before


def bottleneck(summary: Summary) -> str:
    """The bound that held for the largest share of the run."""
    return max(summary.bottleneck_share, key=lambda bound: summary.bottleneck_share[bound])


def spread(samples: Sequence[float]) -> float | None:
    """Half the range of repeated measurements; None of fewer than two."""
    return float(np.ptp(samples) / 2) if len(samples) > 1 else None


def verdict(samples: Sequence[float]) -> Verdict:
    """Whether repeated measurements of a gain differ from 1 by more than their spread."""
    if not samples:
        return "not measured"
    distance = float(np.median(samples)) - 1
    width = spread(samples)
    if width is None or abs(distance) <= width:
        return "no difference"
    return "gain" if distance > 0 else "loss"


def _prediction_and_measurement(predicted: float, relative_error: float, samples: list[float]) -> dict[str, Any]:
    """A row's fields from the predicted value with its interval and the repeats of the measured one."""
    median = float(np.median(samples)) if samples else None
    return {
        "predicted": predicted,
        "low": predicted / (1 + relative_error),
        "high": predicted * (1 + relative_error),
        "measured": median,
        "spread": spread(samples),
        "error": None if median is None else predicted / median - 1,
        "samples": samples,
    }


def baseline_row(
    predicted: RunResult, measured: Sequence[RunResult], relative_error: float, point: dict[str, Any], conditions: str
) -> Comparison:
    """The baseline's decode TPOT, predicted and measured (median of the repeats)."""
    value = metric_value(predicted.summary, "tpot_s")
    samples = [metric_value(run.summary, "tpot_s") for run in measured]
    holds = bottleneck(predicted.summary)
    return Comparison(
        technique="baseline",
        baseline="baseline",
        metric="tpot_s",
        unit=UNITS["tpot_s"],
        point=point,
        **_prediction_and_measurement(value, relative_error, samples),
        verdict="not measured",
        lossless=True,
        quality=None,
        bottleneck_before=holds,
        bottleneck_after=holds,
        conditions=conditions,
    )


def _same_outputs(measured: Sequence[tuple[RunResult, RunResult]]) -> float | None:
    """The share of requests that got the same tokens; None where tokens were drawn, or nobody kept them."""
    kept = [(base.outputs, run.outputs) for base, run in measured if base.scenario.temperature == 0]
    same = [run.get(id) == tokens for base, run in kept for id, tokens in (base or {}).items() if run]
    return float(np.mean(same)) if same else None


def variant_row(
    variant: Variant,
    predicted: tuple[RunResult, RunResult],
    measured: Sequence[tuple[RunResult, RunResult]],
    relative_error: float,
    point: dict[str, Any],
    conditions: str,
    quality: Quality | None = None,
) -> Comparison:
    """A variant's gain; each pair is (baseline, variant), measured pairs ran in the same repeat.

    The measured gain is the median of the pairs' ratios, so that a drift of the machine cancels within each pair. An
    engine that was emulated has none.
    """
    before, after = predicted
    value = gain(before.summary, after.summary, variant.gain_metric)
    emulated = any(run.provenance.emulated for _, run in measured)
    samples = [] if emulated else [gain(base.summary, run.summary, variant.gain_metric) for base, run in measured]
    acceptance = [run.summary.acceptance_rate for _, run in measured if run.summary.acceptance_rate is not None]
    return Comparison(
        technique=variant.name,
        baseline=variant.compared_with(predicted[0].scenario),
        metric=variant.gain_metric,
        unit="ratio",
        point=point,
        **_prediction_and_measurement(value, relative_error, samples),
        verdict="emulated" if emulated else verdict(samples),
        lossless=variant.lossless,
        quality=quality,
        bottleneck_before=bottleneck(before.summary),
        bottleneck_after=bottleneck(after.summary),
        acceptance_rate_predicted=after.summary.acceptance_rate,
        acceptance_rate_measured=float(np.median(acceptance)) if acceptance else None,
        acceptance_by_position=measured[-1][1].acceptance_by_position or None if measured else None,
        same_outputs=_same_outputs(measured),
        conditions=conditions,
    )
