"""What has been measured of a technique, with this model on this machine?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import streamlit as st

from membound.app import text
from membound.app.i18n import Translate
from membound.app.store import Run
from membound.app.views import results
from membound.app.views.session import store
from membound.roofline.reading.plain_yaml import parse_yaml
from membound.roofline.results.comparison import Comparison
from membound.roofline.scenario import parse_scenario
from membound.roofline.techniques import GainMetric

# Of the newest comparisons; older ones are in the history.
MOST_RUNS = 50
USERS = "workload.arrivals.concurrency"
# Up to so many times as many users are about as many.
ABOUT = 2.0


@dataclass(frozen=True)
class Measured:
    """A row of a comparison that ran for real, with its users and the run that it is of."""

    row: Comparison
    users: float
    run_id: str

    def shown(self, t: Translate) -> str:
        """`1.82× ± 0.02 TPOT at 4 users`."""
        spread = "" if self.row.spread is None else f" ± {self.row.spread:.2f}"
        return t(
            "measured.gain",
            gain=f"{text.gain(self.row.measured or 0.0)}{spread}",
            metric=t(f"short.{self.row.metric}"),
            users=f"{self.users:g}",
        )


def measured_gains(model: str, device: str) -> list[Measured]:
    """Every measured gain of the model on a device, the newest run first; none of a device other than this machine."""
    if device != "local":
        return []
    found: list[Measured] = []
    for run in store().runs("compare", limit=MOST_RUNS):
        found.extend(one for name, one in _rows(run) if name == model)
    return found


@dataclass(frozen=True)
class Together:
    """Two runs of one scenario, with techniques and without: by how much the first was better."""

    tpot: float
    rate: float
    users: float
    run_id: str

    def gain(self, metric: GainMetric) -> float:
        return self.tpot if metric == "tpot_s" else self.rate


def measured_together(
    model: str, device: str, kept: Iterable[str], added: Iterable[str], users: float
) -> Together | None:
    """What `added` techniques gained together over an engine with those that it keeps, where both were measured with
    the same workload and about as many users; None otherwise."""
    if device != "local":
        return None
    base = frozenset(kept)
    wanted = base | frozenset(added)
    runs = [one for run in store().runs("measure", limit=MOST_RUNS) for one in _engines(run.id, run)]
    for one in runs:
        for other in runs:
            same = one.workload == other.workload and one.model == other.model == model
            if (
                same
                and one.techniques == wanted
                and other.techniques == base
                and abs(math.log(one.users / users)) < 0.7
            ):
                return Together(other.tpot_s / one.tpot_s, one.rate / other.rate, one.users, one.run_id)
    return None


@dataclass(frozen=True)
class _Engine:
    """What a measured run says of an engine."""

    model: str
    techniques: frozenset[str]
    workload: str
    users: float
    tpot_s: float
    rate: float
    run_id: str


@st.cache_data(max_entries=4 * MOST_RUNS, show_spinner=False)
def _engines(run_id: str, _run: Run) -> list[_Engine]:
    """The engine of a measured run, whose files never change; none of what cannot be read."""
    try:
        scenario, summary = parse_scenario(parse_yaml(_run.scenario_yaml(), "the run")), _run.summary
        tpot_s, rate = float(summary["tpot_s"]["mean"]), float(summary["output_tokens_per_s"])
        users = float(getattr(scenario.workload.arrivals, "concurrency", 0))
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if min(tpot_s, rate, users) <= 0:
        return []
    names = frozenset(technique.name for technique in scenario.techniques)
    return [_Engine(scenario.model, names, scenario.workload.model_dump_json(), users, tpot_s, rate, run_id)]


def nearest(measured: Iterable[Measured], technique: str, users: float, within: float = math.inf) -> Measured | None:
    """The technique's measurement nearest to so many users, the newest of equally near ones; at most `within` times
    as many or as few."""
    of_it = [one for one in measured if one.row.technique == technique]
    best = min(of_it, key=lambda one: abs(math.log(one.users / users)), default=None)
    return None if best is None or abs(math.log(best.users / users)) > math.log(within) else best


def _rows(run: Run) -> list[tuple[str, Measured]]:
    return [
        (model, Measured(Comparison.model_validate(row), users, run.id)) for model, users, row in _read(run.id, run)
    ]


@st.cache_data(max_entries=4 * MOST_RUNS, show_spinner=False)
def _read(run_id: str, _run: Run) -> list[tuple[str, float, dict[str, object]]]:
    """Model, users and row of each measured gain of a run, whose files never change; none of what cannot be read."""
    try:
        scenario = parse_scenario(parse_yaml(_run.scenario_yaml(), "the run"))
        rows = results.rows_of((_run.comparison() or {}).get("comparisons", []))
    except (OSError, ValueError, AttributeError):
        return []
    clients = getattr(scenario.workload.arrivals, "concurrency", None)
    return [
        (scenario.model, float(users), row.model_dump(mode="json"))
        for row in rows
        if row.technique != "baseline" and row.measured is not None
        for users in [row.point.get(USERS, clients)]
        if isinstance(users, int | float) and users > 0
    ]
