"""What has been measured of a technique, with this model on this machine?"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from membound.app import text
from membound.app.i18n import Translate
from membound.app.store import Run
from membound.app.views import results
from membound.app.views.session import store
from membound.roofline.comparison import Comparison
from membound.roofline.scenario import parse_scenario, parse_yaml

# Of the newest comparisons; older ones are in the history.
MOST_RUNS = 50
USERS = "workload.arrivals.concurrency"


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


def nearest(measured: Iterable[Measured], technique: str, users: float, within: float = math.inf) -> Measured | None:
    """The technique's measurement nearest to so many users, the newest of equally near ones; at most `within` times
    as many or as few."""
    of_it = [one for one in measured if one.row.technique == technique]
    best = min(of_it, key=lambda one: abs(math.log(one.users / users)), default=None)
    return None if best is None or abs(math.log(best.users / users)) > math.log(within) else best


def _rows(run: Run) -> list[tuple[str, Measured]]:
    return [
        (model, Measured(Comparison.model_validate(row), users, run.id))
        for model, users, row in _read(run.id, str(run.folder))
    ]


@st.cache_data(max_entries=4 * MOST_RUNS, show_spinner=False)
def _read(run_id: str, folder: str) -> list[tuple[str, float, dict[str, object]]]:
    """Model, users and row of each measured gain of a run, whose files never change; none of what cannot be read."""
    try:
        document = json.loads((Path(folder) / "comparison.json").read_text(encoding="utf-8")) or {}
        scenario = parse_scenario(parse_yaml((Path(folder) / "scenario.yaml").read_text(encoding="utf-8"), "the run"))
        rows = results.rows_of(document.get("comparisons", []))
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
