"""What does a scenario come to over a product of values? Many scenarios, on all cores or on a cluster.

A point that fails keeps its reason, and the others go on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.progress import Progress, silent
from membound.roofline.reading.plain_yaml import parse_yaml
from membound.roofline.scenario import Scenario
from membound.simulator.deployment import deployment_of
from membound.simulator.drafting import with_best_drafts
from membound.simulator.scheduling.build import static_said
from membound.simulator.steady import Steady, load_of, refuse_what_only_runs_show
from membound.simulator.sweeping.axes import at, check
from membound.simulator.workers import Workers

MOST_POINTS = 1_000_000
_BATCHING = ("techniques", "engine.batching", "engine.profile")  # what says how an engine batches


@dataclass(frozen=True)
class Swept:
    """A point: its values by dotted path, and its summary, or why there is none."""

    values: dict[str, Any]
    summary: dict[str, Any] | None
    reason: str | None

    @property
    def row(self) -> dict[str, Any]:
        """The point as a row of a table: its values, the columns of its summary, and the reason."""
        return self.values | flat(self.summary or {}) | {"reason": self.reason}


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """`path=a,b,c` as the path and its values, each read as YAML; raises MemboundError otherwise."""
    path, separator, values = text.partition("=")
    if not separator or not path or not values.strip():
        raise MemboundError(f"option --over is '{text}'; give KEY=A,B,C, such as workload.arrivals.concurrency=1,8,64")
    listed = parse_yaml(f"[{values}]", f"option --over {path}")
    if wrong := [value for value in listed if isinstance(value, float) and not math.isfinite(value)]:
        raise MemboundError(f"option --over {path} has the value {wrong[0]}; give finite numbers")
    if twice := next((value for index, value in enumerate(listed) if value in listed[:index]), None):
        raise MemboundError(f"option --over {path} gives {twice} twice; give each value once")
    return path, listed


def grid(axes: Iterable[tuple[str, Sequence[Any]]]) -> list[dict[str, Any]]:
    """The product of the axes, the last one fastest; raises MemboundError for an axis that is given twice."""
    axes = list(axes)
    paths = [path for path, _ in axes]
    if twice := {path for path in paths if paths.count(path) > 1}:
        raise MemboundError(f"option --over gives {', '.join(sorted(twice))} twice; give all its values at once")
    points = 1
    for _, values in axes:
        points *= len(values)
    if points > MOST_POINTS:
        raise MemboundError(f"the sweep has {points:,} points; give at most {MOST_POINTS:,}")
    return [dict(zip(paths, values, strict=True)) for values in itertools.product(*(values for _, values in axes))]


@dataclass(frozen=True)
class _Task:
    """What a worker gets: plain data, so that any back end can send it."""

    scenario: Scenario
    values: dict[str, Any]
    simulate: bool

    def __call__(self) -> Swept:
        try:
            scenario = at(self.scenario, self.values)
            summary = simulated(scenario) if self.simulate else predicted(scenario)
        except MemboundError as error:
            return Swept(self.values, None, str(error))
        return Swept(self.values, summary, None)


def sweep(
    scenario: Scenario,
    axes: Iterable[tuple[str, Sequence[Any]]],
    *,
    simulate: bool = True,
    workers: Workers | None = None,
    progress: Progress = silent,
    found: list[Swept] | None = None,
) -> list[Swept]:
    """The scenario at every point of the product of `axes`, simulated or by closed forms.

    Points are put into `found` as they come, so that who is stopped has those until then. Raises MemboundError where a
    path is not in the scenario, or a value not one of its field's: that is a mistake, no point that cannot be served.
    """
    scenario = scenario.model_copy(update={"sweep": ()})
    axes = list(axes)
    points = grid(axes)
    check(scenario, axes)
    tasks = [_Task(scenario, values, simulate) for values in points]
    return (workers or Workers()).calls(tasks, progress, found)


def simulated(scenario: Scenario) -> dict[str, Any]:
    """The summary of a discrete-event run."""
    from membound.simulator.run import run

    chosen, drafting = with_best_drafts(scenario)
    return run(chosen).summary.model_dump(mode="json") | ({} if drafting is None else {"drafting": drafting})


def predicted(scenario: Scenario) -> dict[str, Any]:
    """What closed forms say: means of a steady load, none of the tails."""
    refuse_what_only_runs_show(scenario)
    scenario, drafting = with_best_drafts(scenario)
    deployment = deployment_of(scenario, resolve_model(scenario.model), get_hardware(scenario.hardware))
    load = load_of(scenario, deployment)
    steady = Steady(deployment, load)
    steady.check()
    price, devices = deployment.hardware.price_usd_per_h, scenario.setup.parallel.devices
    usd_per_s = None if price is None else price * devices / 3600
    return {
        "concurrency": load.concurrency,
        "batch": steady.batch,
        "output_tokens_per_s": steady.output_tokens_per_s,
        "requests_per_s": steady.requests_per_s,
        "ttft_s": steady.ttft_s,
        "tpot_s": steady.tpot_s,
        "tokens_per_step": deployment.tokens_per_step,
        "drafting": drafting,
        "bottleneck_share": steady.shares,
        "prompt_share": steady.prompt_share,
        "cost_usd_per_million_tokens": None if usd_per_s is None else 1e6 * usd_per_s / steady.output_tokens_per_s,
    }


def flat(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary as columns of a table: `ttft_s.p99`, `bottleneck_share.compute`."""
    columns: dict[str, Any] = {}
    for key, value in summary.items():
        if isinstance(value, dict):
            columns |= {f"{key}.{part}": inner for part, inner in value.items()}
        else:
            columns[key] = value
    return columns


def to_json(scenario: Scenario, points: Sequence[Swept], simulate: bool) -> dict[str, Any]:
    """What `membound sweep --json` prints."""
    return {
        "scenario": scenario.model_dump(mode="json"),
        "by": "simulation" if simulate else "closed form",
        "points": [{"values": p.values, "summary": p.summary, "reason": p.reason} for p in points],
        "notes": list(dict.fromkeys(_static_said(scenario, points))),
    }


def _static_said(scenario: Scenario, points: Sequence[Swept]) -> Iterator[str]:
    """Of points that are served, that their batches are static where nothing was said."""
    served = [point.values for point in points if point.summary is not None]
    policies = [{path: values[path] for path in values if path.startswith(_BATCHING)} for values in served]
    for policy in {repr(policy): policy for policy in policies}.values():
        yield from static_said(at(scenario, policy))
