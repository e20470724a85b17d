"""Experiments that answer an open question of the field, each with a table, a figure and its conditions."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module, resources
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
    kernels = None if ask.runtime is None else ask.runtime.kernels
    before = 0 if kernels is None else kernels.stalls()
    finding: Finding = import_module(f"membound.app.experiments.{EXPERIMENTS[name]}").run(ask)
    made = datetime.now(UTC).date().isoformat()
    if kernels is None:
        return replace(finding, made=made)
    calibration = ask.hardware.calibration
    stalls = kernels.stalls() - before
    held_up = f"other programs held its threads up {stalls} times; what is counted does not depend on that, times do"
    conditions = [*finding.conditions, held_up] if stalls else finding.conditions
    machine = calibration.machine if calibration is not None else ask.hardware.name
    return replace(finding, made=made, machine=machine, conditions=conditions)


def recorded(name: str) -> Finding | None:
    """What an experiment came to where membound's authors ran it; None where no record comes with it."""
    from membound.app.experiments.finding import Finding

    file = resources.files("membound.data") / "experiments" / f"{name}.json"
    return Finding.of(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None
