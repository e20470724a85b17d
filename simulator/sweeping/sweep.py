"""What does a scenario come to over a product of values? Many scenarios, on all cores or on a cluster.

joblib hands the points out, to processes of this machine or to a Dask cluster; to a Ray cluster they go as Ray's tasks.
A point that fails keeps its reason, and the others go on.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import call
from typing import Any, Literal, TypeVar, get_args

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.reading.plain_yaml import parse_yaml
from membound.roofline.scenario import Scenario
from membound.simulator.deployment import deployment_of
from membound.simulator.drafting import with_best_drafts
from membound.simulator.steady import Steady, load_of, refuse_what_only_runs_show
from membound.simulator.sweeping.axes import at, check

Backend = Literal["loky", "threading", "sequential", "ray", "dask"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
MOST_POINTS = 1_000_000
MOST_JOBS = 1024

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[float, str], None]


def _silent(fraction: float, message: str) -> None:
    pass


@dataclass(frozen=True)
class Workers:
    """Who computes: `jobs` at once (all cores where it is not given) of a joblib back end.

    `address` is that of a running Ray or Dask cluster; without it one is started on this machine.
    """

    backend: Backend = "loky"
    jobs: int | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise MemboundError(f"backend is '{self.backend}'; give {', '.join(BACKENDS)}")
        if self.jobs is not None and not 1 <= self.jobs <= MOST_JOBS:
            raise MemboundError(f"jobs is {self.jobs}; give 1 to {MOST_JOBS}")
        if self.address is not None and self.backend not in ("ray", "dask"):
            raise MemboundError(f"the address of a cluster is for backend ray or dask, not '{self.backend}'")

    def map(
        self, function: Callable[[Item], Result], items: Sequence[Item], progress: Progress = _silent
    ) -> list[Result]:
        """`function` of each item, in their order; this process computes where there is one job or one item."""
        results: list[Result] = []
        for done, result in enumerate(self._results(function, items), start=1):
            results.append(result)
            progress(done / len(items), f"{done} of {len(items)}")
        return results

    def calls(self, tasks: Sequence[Callable[[], Result]], progress: Progress = _silent) -> list[Result]:
        """What each of the tasks returns, in their order."""
        return self.map(call, tasks, progress)

    def _results(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        if self.address is not None:
            _check_answers(self.address)
        jobs = self.jobs or (_cores() if self.address is None else -1)
        is_here = self.backend in ("loky", "threading")
        if self.backend == "sequential" or (is_here and min(jobs, len(items)) < 2):
            yield from map(function, items)
            return
        if self.backend == "ray":
            yield from self._on_ray(function, items)
            return
        from joblib import Parallel, delayed, parallel_config

        jobs = min(jobs, len(items)) if is_here else jobs
        with self._cluster(), parallel_config(backend=self.backend, n_jobs=jobs):
            with _interrupts_later():
                results = Parallel(return_as="generator")(delayed(function)(item) for item in items)
            yield from results

    def _on_ray(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Ray's own tasks: its back end of joblib gives results only when all are there."""
        ray = _imported("ray")
        ray.init(
            log_to_driver=False, **({"num_cpus": self.jobs} if self.address is None else {"address": self.address})
        )
        try:
            task = ray.remote(function)
            yield from map(ray.get, [task.remote(item) for item in items])
        finally:
            ray.shutdown()

    @contextlib.contextmanager
    def _cluster(self) -> Iterator[None]:
        """The Dask cluster that the back end talks to, while it is needed."""
        if self.backend == "dask":
            with _imported("dask.distributed").Client(self.address, set_as_default=True):
                yield
        else:
            yield


def _check_answers(address: str) -> None:
    """Raises MemboundError where nobody listens at HOST:PORT; other addresses ("auto") are the cluster's to know."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10.0).close()
    except (OSError, OverflowError) as error:
        raise MemboundError(
            f"option --address is '{address}', where no cluster answers ({error}); give HOST:PORT of one that runs"
        ) from None


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Holds Ctrl-C back while workers start: they inherit that for good, so that this process alone answers it."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _imported(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.split(".")[0]
        wanted = {"dask": "'dask[distributed]'"}.get(package, package)
        raise MemboundError(f"backend '{package}' needs {wanted}, which is not installed; pip install it") from None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Swept:
    """A point: its values by dotted path, and its summary, or why there is none."""

    values: dict[str, Any]
    summary: dict[str, Any] | None
    reason: str | None


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
    progress: Progress = _silent,
) -> list[Swept]:
    """The scenario at every point of the product of `axes`, simulated or by closed forms.

    Raises MemboundError where a path is not in the scenario, or a value not one of its field's: that is a mistake, no
    point that cannot be served.
    """
    scenario = scenario.model_copy(update={"sweep": ()})
    axes = list(axes)
    points = grid(axes)
    check(scenario, axes)
    tasks = [_Task(scenario, values, simulate) for values in points]
    return (workers or Workers()).calls(tasks, progress)


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
    }
