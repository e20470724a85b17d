"""Experiments that answer an open question of the field, each with a table, a figure and its conditions."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from membound.app.experiments.finding import Ask, Finding

# Those that measure need torch, so that each is imported when it is asked for.
EXPERIMENTS = {
    "x1": "quantized_acceptance",
    "x2": "task_acceptance",
    "x3": "reuse",
    "x4": "baselines",
    "x5": "stacking_map",
}
# Those that measure nothing, for which device they predict, and on which scenario's machine the others measure.
PREDICTED = ("x5",)
PREDICTED_FOR, MEASURED_BY = "H100-SXM5", "live-cpu"


def run(name: str, ask: Ask) -> Finding:
    """Runs an experiment by its name."""
    finding: Finding = import_module(f"membound.app.experiments.{EXPERIMENTS[name]}").run(ask)
    return finding
