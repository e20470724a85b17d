"""How is a kernel launched: with which tile sizes, warps and pipeline stages?

They are data: `launch.json` holds, for each kernel, rules that are tried in order, so that nothing is tuned when the
process starts and a build without a GPU knows the default of each architecture. A rule names the architectures it is
for (all, if it names none) and the range of every shape that it needs; the last rule of a kernel fits always.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from membound.kernels.triton.machine import Machine, machine_of
from membound.kernels.triton.overlapping import overlapping

TABLE = Path(__file__).with_name("launch.json")


@dataclass(frozen=True)
class Config:
    """`tiles` are the kernel's compile-time sizes by name, such as BLOCK_T.

    A multiprocessor runs `at_once` of its programs, where the table knows it.
    """

    tiles: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 2
    at_once: int | None = None

    def with_tiles(self, **tiles: int) -> Config:
        """This configuration with other sizes, for those that follow from the shapes."""
        return replace(self, tiles={**self.tiles, **tiles})


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its grid, its run-time arguments in order, its compile-time ones, its configuration."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    config: Config

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


@dataclass
class Recording:
    """The launches that would have happened on `machine`."""

    machine: Machine
    launches: list[Launch] = field(default_factory=list)


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextmanager
def recording(machine: Machine) -> Iterator[Recording]:
    """Inside, kernels are not launched but listed, as `machine` would run them; tensors may be of device 'meta'."""
    record = Recording(machine)
    token = _recording.set(record)
    try:
        yield record
    finally:
        _recording.reset(token)


def is_recording() -> bool:
    """Whether launches are listed only."""
    return _recording.get() is not None


def machine_for(tensor: torch.Tensor) -> Machine:
    """The machine that a kernel over `tensor` will run on."""
    record = _recording.get()
    return machine_of(tensor.device) if record is None else record.machine


_launched: dict[str, Any] = {}


def compiled() -> int:
    """How many variants of the launched kernels Triton has compiled, or found in its cache, in this process."""
    caches = (getattr(kernel, "device_caches", {}).values() for kernel in list(_launched.values()))
    return sum(len(cache[0]) for of_kernel in caches for cache in of_kernel)


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, config: Config, **constants: Any) -> None:
    """Starts `kernel` on every point of `grid`; an empty grid starts nothing.

    One that has OVERLAP among its constants may begin before the launch before it has ended, where the machine can.
    """
    record = _recording.get()
    device = next((argument.device for argument in arguments if isinstance(argument, torch.Tensor)), None)
    constants = {**config.tiles, **constants}
    if "OVERLAP" in getattr(kernel, "arg_names", ()):
        assert device is not None, "every kernel has tensors"
        machine = machine_of(device) if record is None else record.machine
        constants["OVERLAP"] = overlapping(machine, device, recorded=record is not None)
    if record is not None:
        record.launches.append(Launch(kernel, tuple(grid), arguments, constants, config))
    elif all(grid):
        _launched[kernel.__name__] = kernel
        with _current(device):
            _start(kernel, tuple(grid), arguments, constants, config)


_fitting: dict[tuple[object, ...], int] = {}  # the stages of what does not fit with its configuration's


def _start(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any], config: Config
) -> None:
    """With as many of the configuration's stages as this GPU has shared memory for, if it is one without a rule."""
    # Not named where it is not so: Triton has no such option for other makers' GPUs.
    options = {"launch_pdl": True} if constants.get("OVERLAP") else {}
    tuned = kernel.__name__, config.num_warps, config.num_stages, *constants.values()
    stages = _fitting.get(tuned, config.num_stages) if _fitting else config.num_stages
    while True:
        if "STAGES" in constants:
            constants["STAGES"] = stages
        try:
            kernel[grid](*arguments, **constants, num_warps=config.num_warps, num_stages=stages, **options)
            return
        except OutOfResources:
            if stages == 1:
                raise
            stages -= 1
            _fitting[tuned] = stages


def _current(device: torch.device | None) -> AbstractContextManager[object]:
    """Triton launches on the current device, wherever its arguments lie: makes that theirs."""
    if device is None or device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def configure(kernel: str, machine: Machine, **shape: int) -> Config:
    """The stored configuration of `kernel` for a machine and the shapes by which its rules choose."""
    for rule in _rules()[kernel]:
        if "arch" in rule and machine.arch not in rule["arch"]:
            continue
        if all(low <= shape[name] <= high for name, (low, high) in rule.get("when", {}).items()):
            return Config(rule["tiles"], rule["num_warps"], rule["num_stages"], rule.get("at_once"))
    raise KeyError(f"launch.json has no rule of {kernel} that fits {machine.arch} and {shape}")


@cache
def _rules() -> dict[str, list[dict[str, Any]]]:
    rules: dict[str, list[dict[str, Any]]] = json.loads(TABLE.read_text("utf-8"))
    return rules


MOST_SPLITS = 64  # the reduction reads one partial result a split
AS_GOOD = 1.05  # of two numbers of splits whose times differ by less, the smaller one


def splits_for(
    programs: int, longest: int, shortest_part: int, machine: Machine, waves: int = 2, most: int = MOST_SPLITS
) -> int:
    """In how many parts to cut a sum of `longest` terms, of which each multiprocessor runs `waves` programs at once.

    `programs` run without splitting; a part shorter than `shortest_part` costs more to combine than it gains. A last
    round of few programs takes as long as a full one, so the rounds times the length of a part are what is least.
    """
    places, programs = waves * machine.multiprocessors, max(programs, 1)
    most = max(1, min(most, -(-longest // shortest_part), 2 * -(-places // programs)))
    times = [-(-programs * splits // places) * -(-longest // splits) for splits in range(1, most + 1)]
    return next(splits for splits, time in enumerate(times, start=1) if time <= AS_GOOD * min(times))
