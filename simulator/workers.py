"""Who computes many scenarios: this process, the cores of this machine, or a cluster?

joblib hands the work out, to processes of this machine or to a Dask cluster; to a Ray cluster it goes as Ray's tasks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import call
from typing import Any, Literal, TypeVar, get_args

from membound.roofline.errors import MemboundError
from membound.roofline.progress import Progress, silent

Backend = Literal["loky", "threading", "sequential", "ray", "dask"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
MOST_JOBS = 1024

Item = TypeVar("Item")
Result = TypeVar("Result")


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
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        progress: Progress = silent,
        results: list[Result] | None = None,
    ) -> list[Result]:
        """`function` of each item, in their order; this process computes where there is one job or one item.

        They are put into `results` as they come, so that who is stopped has those until then.
        """
        results = [] if results is None else results
        for done, result in enumerate(self._results(function, items), start=1):
            results.append(result)
            progress(done / len(items), f"{done} of {len(items)}")
        return results

    def calls(
        self, tasks: Sequence[Callable[[], Result]], progress: Progress = silent, results: list[Result] | None = None
    ) -> list[Result]:
        """What each of the tasks returns, in their order."""
        return self.map(call, tasks, progress, results)

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
