"""How does a program ask what the commands ask? A function for each question; answers are plain, typed values.

A question is a `Scenario`, the name of one that ships with membound, the path of a YAML file, or a mapping with a
scenario's fields. Whatever cannot be answered raises `MemboundError`, one sentence that says what to give instead.

    from membound.app import api

    point = api.predict("plan-70b", batch=32, context=4096)
    print(point.time_s, point.bottleneck)

`measure`, `compare` and `calibrate` need torch; nothing else imports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from membound.app.reports.drafts import drafting
from membound.roofline.applicable import check_applicable
from membound.roofline.divisible import check_parallel
from membound.roofline.errors import MemboundError
from membound.roofline.grid import decode_grid
from membound.roofline.hardware import get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.operating_point import OperatingPoint, Phase
from membound.roofline.progress import Progress, silent
from membound.roofline.results.result import RunResult
from membound.roofline.scenario import Scenario, load_scenario, parse_scenario
from membound.roofline.techniques import GainMetric
from membound.roofline.times.known import times_for
from membound.simulator.advice import advisor
from membound.simulator.advice.advisor import Advice
from membound.simulator.drafting import with_best_drafts
from membound.simulator.planning import planner
from membound.simulator.planning.demand import Objective
from membound.simulator.planning.planner import Plan
from membound.simulator.run import run
from membound.simulator.scheduling.recorder import Observer
from membound.simulator.stacking import stacking
from membound.simulator.stacking.stacking import Stack
from membound.simulator.steady import usual_step
from membound.simulator.sweeping import sweep as sweeping
from membound.simulator.sweeping.sweep import Swept
from membound.simulator.workers import Workers

if TYPE_CHECKING:
    from membound.app.compare import ComparisonResult
    from membound.roofline.hardware.calibration import Calibration

__all__ = [
    "Advice",
    "MemboundError",
    "OperatingPoint",
    "Plan",
    "Question",
    "RunResult",
    "Scenario",
    "Stack",
    "Swept",
    "Workers",
    "advise",
    "calibrate",
    "compare",
    "decode_seconds",
    "measure",
    "plan",
    "predict",
    "scenario",
    "simulate",
    "stack",
    "sweep",
]

# A scenario, the name of one that ships with membound, the path of a YAML file, or a scenario's fields.
Question = Scenario | str | Path | Mapping[str, Any]


def scenario(question: Question, values: Mapping[str, Any] | None = None) -> Scenario:
    """The scenario that a question is, with other `values` by the dotted path of their field.

    `scenario("plan-70b", {"hardware": "H200-SXM", "workload.requests": 500})`
    """
    if isinstance(question, Scenario):
        found = question
    elif isinstance(question, Mapping):
        found = parse_scenario(dict(question))
    elif isinstance(question, str | Path):
        found = load_scenario(str(question))
    else:
        raise MemboundError(
            f"the scenario is {question!r}; give a name, a path, a mapping of its fields, or a Scenario"
        )
    if not isinstance(values or {}, Mapping) or not all(isinstance(path, str) for path in values or {}):
        raise MemboundError(
            f"values is {values!r}; give a mapping of dotted paths to values, such as {{'parallel.tp': 2}}"
        )
    return found.with_values(values or {})


def predict(
    question: Question, *, batch: int | None = None, context: int | None = None, phase: Phase = "decode"
) -> OperatingPoint:
    """One step under the roofs: seconds, bottleneck, operators, and bytes of memory.

    `batch` sequences of `context` tokens each; what is not given is that of the scenario's own load.
    """
    asked = scenario(question)
    if batch is None or context is None:
        usual = usual_step(asked, phase)
        batch = usual.batch if batch is None else batch
        context = usual.context if context is None else context
    return OperatingPoint.of(asked, batch=batch, context=context, phase=phase)


def decode_seconds(question: Question, batches: ArrayLike, contexts: ArrayLike) -> NDArray[np.float64]:
    """Seconds of decode steps [batches, contexts], without drafts, worked out together.

    Whether they fit in memory is not asked; `predict` says for one step.
    """
    asked = scenario(question)
    for name, values in (("batches", batches), ("contexts", contexts)):
        array = np.asarray(values)
        if array.dtype.kind not in "iuf" or array.ndim > 1 or not (array.size and np.all(array >= 1)):
            raise MemboundError(f"{name} is {values!r}; give numbers from 1 on, alone or in a sequence")
    model, setup = resolve_model(asked.model), asked.setup
    check_parallel(model, setup)
    check_applicable(model, setup)
    if (longest := np.max(contexts)) > model.max_context:
        raise MemboundError(f"context is {longest:g}, more than the {model.max_context} tokens of '{model.name}'")
    times = times_for(get_hardware(asked.hardware), setup.profile)
    return decode_grid(model, [setup], times, np.atleast_1d(batches), np.atleast_1d(contexts))[0]


def simulate(question: Question, *, observer: Observer | None = None) -> RunResult:
    """The whole workload in virtual time: a record of each request and step, and their summary.

    `observer` sees every step as it ends. Where the scenario leaves the size of its drafts open, the best is taken.
    """
    sized, drafts = with_best_drafts(scenario(question))
    result = run(sized, observer=observer)
    if drafts is not None and not drafts.get("replayed"):
        result.provenance.notes.append(drafting(drafts))
    return result


def stack(
    question: Question,
    *,
    techniques: str | Sequence[str] | None = None,
    batches: int | Sequence[int] = (),
    contexts: int | Sequence[int] = (),
    metric: GainMetric | None = None,
    simulate: bool = False,
    workers: Workers | None = None,
    progress: Progress = silent,
) -> list[Stack]:
    """What techniques gain alone and together, and the bottleneck after each: one analysis for each batch and context.

    Of the scenario's techniques unless `techniques` names others (`"weight_quantization:int4"` gives a format), at the
    scenario's own load where no batches and contexts are given. Gains are by closed forms, or from runs in virtual
    time, which `workers` spread, where `simulate`.
    """
    return stacking.stack(
        scenario(question),
        techniques=None if techniques is None else _names("techniques", techniques),
        batches=_several(batches),
        contexts=_several(contexts),
        metric=metric,
        simulate=simulate,
        workers=workers,
        progress=progress,
    )


def advise(
    question: Question,
    *,
    batch: int | None = None,
    context: int | None = None,
    metric: GainMetric | None = None,
    simulate: bool = False,
    workers: Workers | None = None,
    progress: Progress = silent,
) -> Advice:
    """What to change first at this operating point: moves by their gain, each with its reason and price in quality."""
    return advisor.advise(
        scenario(question),
        batch=batch,
        context=context,
        metric=metric,
        simulate=simulate,
        workers=workers,
        progress=progress,
    )


def plan(
    question: Question,
    *,
    devices: str | Sequence[str] | None = None,
    precisions: str | Sequence[str] = planner.PRECISIONS,
    objective: Objective = "cost",
    confirm: int = 3,
    workers: Workers | None = None,
    progress: Progress = silent,
) -> Plan:
    """The cheapest deployment, or that of the fewest devices, that meets the scenario's objective.

    Closed forms screen; the simulator confirms `confirm` of the best. `best` is None where nothing meets the objective,
    and `reason` says by how much the nearest misses.
    """
    return planner.plan(
        scenario(question),
        devices=None if devices is None else _names("devices", devices),
        precisions=_names("precisions", precisions),
        objective=objective,
        confirm=confirm,
        workers=workers,
        progress=progress,
    )


def sweep(
    question: Question,
    over: Mapping[str, Any],
    *,
    simulate: bool = True,
    workers: Workers | None = None,
    progress: Progress = silent,
) -> list[Swept]:
    """The scenario at every point of the product of values, on all cores unless `workers` says who computes.

    `over` has the values of fields by their dotted paths, or of `batch` and `context`, each a sequence, an array or one
    value; the last field varies fastest.
    Where not `simulate`, closed forms give the means of a steady load. A point that cannot be served says why in its
    `reason`. `pandas.DataFrame(point.row for point in sweep(...))` is a table.
    """
    axes = [(path, _several(values)) for path, values in over.items()]
    if empty := [path for path, values in axes if not values]:
        raise MemboundError(f"over['{empty[0]}'] has no values; give at least one, or leave the field out")
    return sweeping.sweep(scenario(question), axes, simulate=simulate, workers=workers, progress=progress)


def calibrate(*, device: str = "cpu", quick: bool = False, progress: Progress = silent) -> Calibration:
    """Measures the roofs of this machine's `cpu` or GPU (`cuda`) and keeps them: from then on it is hardware `local`.

    Takes two to three minutes where nothing else runs; `quick`, for dense models in bf16 and int8, half a minute.
    """
    from membound.app.machine import calibrate_machine

    with _alone("calibrate", progress):
        return calibrate_machine(device, quick=quick, progress=progress)


def measure(question: Question, *, observer: Observer | None = None, progress: Progress = silent) -> RunResult:
    """The workload with a real model on this machine, which must be calibrated; records are those of `simulate`."""
    from membound.app.machine import machine_for

    asked = scenario(question)
    with _alone("measure", progress):
        hardware, runtime = machine_for(asked)
        return runtime.run(asked, hardware, observer=observer)


def compare(question: Question, *, progress: Progress = silent) -> ComparisonResult:
    """Each technique predicted and measured on this machine, which must be calibrated: gains, errors and quality."""
    from membound.app.compare import compare as compared
    from membound.app.listener import ProgressListener
    from membound.app.machine import machine_for

    asked = scenario(question)
    with _alone("compare", progress):
        hardware, runtime = machine_for(asked)
        return compared(asked, hardware, runtime, ProgressListener(progress))


def _several(given: Any) -> list[Any]:
    """What may be given alone or in a sequence or array; a text, and a mapping, is one value."""
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        return [given]
    return list(given.tolist() if isinstance(given, np.ndarray) else given)


def _names(field: str, given: Any) -> list[str]:
    names = _several(given)
    if strange := [name for name in names if not isinstance(name, str)]:
        raise MemboundError(f"{field} has {strange[0]!r}; give names as text, alone or in a sequence")
    return names


@contextmanager
def _alone(holder: str, progress: Progress) -> Iterator[None]:
    """Waits until no other measurement runs on this machine, as both would disturb each other."""
    from membound.app.jobs import measurement_slot

    with measurement_slot(f"membound {holder}", lambda ahead: progress(0.0, f"waiting for {ahead} to finish")):
        yield
