"""What has been measured of a technique, with this model on this machine?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import streamlit as st

from membound.app import text
from membound.app.engine_choice import EngineChoice
from membound.app.i18n import Translate
from membound.app.records import Run
from membound.app.views import results
from membound.app.views.session import store
from membound.app.views.verdicts import baseline_words, labelled
from membound.roofline.precision import Role
from membound.roofline.precision.names import parse_precision
from membound.roofline.results.comparison import Comparison
from membound.roofline.scenario import Scenario, scenario_of_text
from membound.roofline.techniques import GainMetric, Speculative, Technique

# Of the newest comparisons; older ones are in the history.
MOST_RUNS = 50
# Up to so many times as many users are about as many.
ABOUT = 2.0
# The fields of a layer's techniques that name a format, and what is in that format.
FORMATS: dict[str, dict[str, Role]] = {
    "weights": {"format": "weights", "activations": "activations", "lm_head": "weights"},
    "kv": {"format": "kv"},
}
# What changes none of the speeds of an engine; what is compared, or swept over, a run of one engine does not have.
APART = {"name", "description", "techniques", "slo", "repeats", "sweep", "variants"}


@dataclass(frozen=True)
class Measured:
    """The gain of one technique that ran for real, with its model, its users and the run that it is of."""

    row: Comparison
    technique: Technique
    model: str
    users: float
    run_id: str

    def shown(self, t: Translate) -> str:
        """`1.82× ± 0.02 TPOT at users: 4 (8-bit weights over bf16 weights)`."""
        spread = "" if self.row.spread is None else f" ± {self.row.spread:.2f}"
        method = getattr(self.technique, "method", None)
        return t(
            "measured.gain",
            gain=f"{text.gain(self.row.measured or 0.0)}{spread}",
            metric=t(f"short.{self.row.metric}"),
            users=f"{self.users:g}",
            technique=labelled(self.technique, t) + (f", {method}" if method else ""),
            baseline=baseline_words(self.technique.name, self.row.baseline, t),
        )

    def is_of(self, technique: Technique) -> bool:
        """Whether it says something of the technique: the same in the same formats, however their codes were chosen.

        A guess may be longer or shorter: how long is best is found at each operating point.
        """
        return _speed(self.technique) == _speed(technique)


def measured_gains(model: str, device: str) -> list[Measured]:
    """Every measured gain of the model on a device, the newest run first; none of a device other than this machine."""
    if device != "local":
        return []
    runs = store().runs("compare", limit=MOST_RUNS)
    return [one for run in runs for one in _gains(run.id, run) if one.model == model]


def nearest(
    measured: Iterable[Measured], technique: Technique, users: float, within: float = math.inf
) -> Measured | None:
    """The technique's measurement nearest to so many users, of equally near ones by the same method, of those the
    newest; at most `within` times as many or as few."""

    def distance(one: Measured) -> float:
        return abs(math.log(one.users / users))

    of_it = [one for one in measured if one.is_of(technique)]
    best = min(of_it, key=lambda one: (distance(one), one.technique != technique), default=None)
    return None if best is None or distance(best) > math.log(within) else best


@dataclass(frozen=True)
class Together:
    """Two runs of one scenario, with techniques and without: by how much the first was better."""

    tpot: float
    rate: float
    users: float
    run_id: str

    def gain(self, metric: GainMetric) -> float:
        return self.tpot if metric == "tpot_s" else self.rate


def measured_together(choice: EngineChoice, kept: Iterable[str], added: Iterable[str]) -> Together | None:
    """What `added` techniques gained together over an engine with those that it keeps, where both were measured here
    in the same formats under the same workload of about as many users; None otherwise."""
    if choice.device_name != "local":
        return None
    base = {_speed(choice.technique(name)) for name in kept}
    wanted = base | {_speed(choice.technique(name)) for name in added}
    runs = [one for run in store().runs("measure", limit=MOST_RUNS) for one in _engines(run.id, run)]
    near = [one for one in runs if one.model == choice.model_name and abs(math.log(one.users / choice.batch)) < 0.7]
    for one in near:
        for other in near:
            same = one.apart == other.apart and other.techniques <= one.techniques
            if same and one.speeds == wanted and other.speeds == base:
                return Together(other.tpot_s / one.tpot_s, one.rate / other.rate, one.users, one.run_id)
    return None


@dataclass(frozen=True)
class _Engine:
    """What a measured run says of an engine: its techniques, and `apart` from them everything that it depends on."""

    model: str
    apart: str
    techniques: frozenset[str]
    speeds: frozenset[object]
    users: float
    tpot_s: float
    rate: float
    run_id: str


@st.cache_resource(max_entries=4 * MOST_RUNS, show_spinner=False)
def _engines(run_id: str, _run: Run) -> Sequence[_Engine]:
    """The engine of a run of this machine, whose files never change; none of what cannot be read."""
    try:
        if not _run.measured_here():
            return ()
        scenario, summary = _scenario(_run), _run.summary
        tpot_s, rate = float(summary["tpot_s"]["mean"]), float(summary["output_tokens_per_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    users = _users(scenario)
    if min(tpot_s, rate, users) <= 0:
        return ()
    apart = scenario.model_dump_json(exclude=APART)
    techniques = frozenset(technique.model_dump_json() for technique in scenario.techniques)
    speeds = frozenset(map(_speed, scenario.techniques))
    return (_Engine(scenario.model, apart, techniques, speeds, users, tpot_s, rate, run_id),)


@st.cache_resource(max_entries=4 * MOST_RUNS, show_spinner=False)
def _gains(run_id: str, _run: Run) -> Sequence[Measured]:
    """The gain of each technique that a comparison of this machine has alone; none of what cannot be read.

    A row has the name of a variant; which techniques that has, and in which formats, is in the run's scenario.
    """
    try:
        if not _run.measured_here():
            return ()
        scenario = _scenario(_run)
        rows = results.rows_of((_run.comparison() or {}).get("comparisons", []))
        alone = {one.name: one.techniques[0] for one in scenario.compared() if len(one.techniques) == 1 and not one.set}
        points = {str(row.point): row.point for row in rows}
        at = {name: scenario.with_values(point) for name, point in points.items()}
        found = [(row, at[str(row.point)]) for row in rows if row.technique in alone and row.measured]
    except (OSError, ValueError, AttributeError):
        return ()
    return tuple(
        Measured(row, alone[row.technique], there.model, _users(there), run_id)
        for row, there in found
        if _users(there) > 0
    )


def _scenario(run: Run) -> Scenario:
    return scenario_of_text(run.scenario_yaml(), "the run")


def _users(scenario: Scenario) -> float:
    """How many there are in a closed loop; 0 of other traffic, which has no number of them."""
    return float(getattr(scenario.workload.arrivals, "concurrency", 0))


def _speed(technique: Technique) -> object:
    """What two techniques have in common that are equally fast: what they are, their formats and policies.

    `method` chooses codes and zeros, and neither their number nor their size; the length of drafts is left open.
    """
    if isinstance(technique, Speculative):
        return technique.name
    given: dict[str, Any] = technique.model_dump(exclude={"method"})
    for part, of in FORMATS.get(technique.layer, {}).items():
        known = parse_precision(given.get(part) or "", of)
        given |= {} if known is None else {part: known.name}
    return tuple(sorted((name, str(value)) for name, value in given.items()))
