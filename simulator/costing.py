"""How fast is an engine under a load: by closed forms in milliseconds, or by a discrete-event run?

Stacks and advice ask this of many engines that differ by a technique or two; each is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import numpy as np

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.progress import Progress
from membound.roofline.ratio_error import Timed, kernels_of, ratio_error
from membound.roofline.results.comparison import bottleneck, metric_value
from membound.roofline.results.result import Column, RunResult
from membound.roofline.scenario import Scenario
from membound.roofline.techniques import GainMetric
from membound.simulator.deployment import deployment_of
from membound.simulator.drafting import with_best_drafts
from membound.simulator.load import Load
from membound.simulator.steady import Steady, refuse_what_only_runs_show
from membound.simulator.workers import Workers


class Served(NamedTuple):
    """How an engine serves: both metrics, the sequences that decode together, and each bound's share of the time.

    `drafting` has the parameters of its speculation. `prompt_share` is the share of the time that prompts take; for a
    run in which no step decodes alone it cannot be told, and is None. `kernels` are what each bound's time
    depends on.
    """

    tpot_s: float
    output_tokens_per_s: float
    batch: float
    bottleneck: str
    shares: dict[str, float]
    drafting: dict[str, Any] | None = None
    prompt_share: float | None = None
    kernels: Mapping[str, Hashable] = MappingProxyType({})

    def document(self) -> dict[str, Any]:
        """What is printed and kept: all but the kernels, which only tell two engines apart."""
        return {name: value for name, value in self._asdict().items() if name != "kernels"}

    def better(self, than: Served, metric: GainMetric) -> float:
        """The gain over another engine: the ratio of times or rates, above 1 if this one is better."""
        if metric == "tpot_s":
            return than.tpot_s / self.tpot_s
        return self.output_tokens_per_s / than.output_tokens_per_s

    def gain_error(self, than: Served, error: float) -> float:
        """The relative interval of the gain over another, where times are within `error`: with how far the acceptance
        may be off that only one of them depends on. Both are independent, so that their logarithms add in squares."""
        gain = max((self.better(than, metric) for metric in get_args(GainMetric)), key=lambda gain: abs(math.log(gain)))
        kernels = ratio_error(error, than._timed, self._timed, gain)
        return math.expm1(math.hypot(math.log1p(kernels), math.log1p(abs(self._acceptance - than._acceptance))))

    @property
    def _timed(self) -> Timed:
        return Timed(self.shares, self.kernels, self.batch)

    @property
    def _acceptance(self) -> float:
        """The relative interval of the tokens that a step emits; 0 without speculation."""
        return float((self.drafting or {}).get("acceptance_error", 0.0))


@dataclass(frozen=True)
class ClosedForm:
    """The roofline of a steady load; raises MemboundError for an engine that is not possible."""

    load: Load

    def __call__(self, scenario: Scenario) -> Served:
        refuse_what_only_runs_show(scenario)
        scenario, drafting = with_best_drafts(scenario, self.load)
        deployment = deployment_of(scenario, resolve_model(scenario.model), get_hardware(scenario.hardware))
        steady = Steady(deployment, self.load)
        steady.check()
        return Served(
            steady.tpot_s,
            steady.output_tokens_per_s,
            steady.batch,
            steady.bottleneck,
            steady.shares,
            drafting,
            steady.prompt_share,
            _kernels(scenario),
        )


def simulated(scenario: Scenario) -> Served:
    """The result of a discrete-event run, at the busiest part if arrivals vary.

    Raises MemboundError for an engine that is not possible.
    """
    from membound.simulator.run import run

    scenario, drafting = with_best_drafts(scenario, at_busiest=True)
    result = run(scenario)
    summary, steps = result.summary, result.steps
    if not summary.completed:
        raise MemboundError(nothing_served(result))
    decoding = steps["sequences"] - steps["prefill_sequences"]
    decoding_s = steps["time_s"] * (decoding > 0)
    batch = float((decoding * decoding_s).sum() / max(decoding_s.sum(), 1e-12))
    tpot_s, rate = metric_value(summary, "tpot_s"), summary.output_tokens_per_s
    share = _prompt_share(steps)
    return Served(
        tpot_s, rate, batch, bottleneck(summary), summary.bottleneck_share, drafting, share, _kernels(scenario)
    )


def _kernels(scenario: Scenario) -> dict[str, Hashable]:
    return kernels_of(scenario.setup, scenario.model, scenario.hardware)


def _prompt_share(steps: Mapping[str, Column]) -> float | None:
    """The share of the steps' time that prompts take. In steps that also decode, it is the time beyond that of a decode
    step without prompts."""
    decoding, prompts = steps["sequences"] > steps["prefill_sequences"], steps["prefill_sequences"] > 0
    both, alone = decoding & prompts, decoding & ~prompts
    time_s, count = steps["time_s"], steps["steps"]
    if both.any() and not alone.any():
        return None
    decode_s = float(time_s[alone].sum() / count[alone].sum()) if alone.any() else 0.0
    prompts_s = time_s[prompts & ~both].sum() + np.maximum(0.0, time_s[both] - decode_s * count[both]).sum()
    return float(prompts_s / max(time_s.sum(), 1e-12))


def nothing_served(result: RunResult) -> str:
    """Why a run has served no request, as the first one was told."""
    turned_away = "requests were turned away; "
    notes = [note.removeprefix(turned_away) for note in result.provenance.notes if note.startswith(turned_away)]
    return f"no request is served: {notes[0] if notes else 'none arrives'}"


Evaluate = Callable[[Scenario], Served]


class Costing:
    """How fast engines are, each computed once, or a sentence that says why one is not possible."""

    def __init__(self, evaluate: Evaluate, workers: Workers | None = None) -> None:
        self._evaluate = evaluate
        self._workers = workers or Workers("sequential")
        self._found: dict[str, Served | str] = {}

    def ahead(self, scenarios: Sequence[Scenario], progress: Progress) -> None:
        """Computes many at a time, so that asking for them later takes no time."""
        unknown = {scenario.digest: scenario for scenario in scenarios}
        tasks = [(self._evaluate, one) for digest, one in unknown.items() if digest not in self._found]
        done = self._workers.map(_outcome, tasks, progress)
        self._found |= {scenario.digest: outcome for (_, scenario), outcome in zip(tasks, done, strict=True)}

    def served(self, scenario: Scenario) -> Served | str:
        """How fast the scenario's engine is, or why it is not possible."""
        digest = scenario.digest
        if digest not in self._found:
            self._found[digest] = _outcome((self._evaluate, scenario))
        return self._found[digest]


def _outcome(task: tuple[Evaluate, Scenario]) -> Served | str:
    evaluate, scenario = task
    try:
        return evaluate(scenario)
    except MemboundError as error:
        return str(error)
