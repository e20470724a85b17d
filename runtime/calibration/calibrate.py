"""What can this machine do? Measures its roofs and its kernels with micro-benchmarks, never with a scenario's run."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from membound.kernels.base import Kernels
from membound.kernels.dispatch import kernels_for
from membound.roofline.hardware import hardware_of
from membound.roofline.hardware.calibration import CACHE_SET_BYTES, BandwidthPoint, Calibration
from membound.roofline.operators import Operator, linear
from membound.roofline.precision import PRECISIONS
from membound.roofline.progress import Progress
from membound.roofline.times.calibrated import CalibratedTimes
from membound.runtime.calibration.bandwidth import WORKING_SETS, BandwidthProbe
from membound.runtime.calibration.host import HostGrid, HostProbe
from membound.runtime.calibration.layers import LAYER_KINDS, LayerGrid, LayerProbe
from membound.runtime.calibration.linears import LinearGrid, LinearProbe
from membound.runtime.calibration.memory_watch import MemoryWatch, watchable
from membound.runtime.calibration.operators import (
    KV_KINDS,
    Heads,
    Load,
    OperatorGrid,
    OperatorProbe,
    attention_amounts,
    fit,
)
from membound.runtime.calibration.passes import PATIENCE_S, CalibrationError, Part, Repeated, repeat
from membound.runtime.calibration.pool import Pool
from membound.runtime.calibration.stopwatch import Stopwatch
from membound.runtime.free_memory import free_bytes

POOL_BYTES = 2**30
POOL_SHARE = 0.25  # of the memory that is free
MEMORY_FROM_BYTES = 256 * 2**20
BUSY_LOAD = 0.5
KINDS = ("rms_norm", "add_rms_norm", "rope_and_store", "silu_mul", "embed", "attention", *KV_KINDS)

__all__ = ["QUICK", "CalibrationError", "CalibrationPlan", "calibrate"]


@dataclass(frozen=True)
class LinearCheck:
    """A linear whose time the tables must tell without having seen it."""

    n: int
    k: int
    m: int


@dataclass(frozen=True)
class AttentionCheck:
    """An attention whose time its cost must tell without having seen it."""

    heads: Heads
    load: Load


CHECKS = (
    LinearCheck(700, 900, 1),
    LinearCheck(700, 900, 5),
    LinearCheck(3000, 700, 1),
    LinearCheck(3000, 700, 7),
    LinearCheck(3000, 700, 20),
    LinearCheck(1300, 2900, 2),
    LinearCheck(1300, 2900, 40),
    LinearCheck(9000, 600, 13),
    LinearCheck(30000, 1000, 1),
    LinearCheck(30000, 1000, 4),
    AttentionCheck(Heads(12, 4, 64), Load(1, 300)),
    AttentionCheck(Heads(12, 4, 64), Load(6, 200)),
    AttentionCheck(Heads(12, 4, 64), Load(1, 100, 100)),
)


@dataclass(frozen=True)
class CalibrationPlan:
    """What a calibration measures; a test measures less."""

    working_sets: tuple[int, ...] = WORKING_SETS
    linears: LinearGrid = field(default_factory=LinearGrid)
    operators: OperatorGrid = field(default_factory=OperatorGrid)
    host: HostGrid = field(default_factory=HostGrid)
    layers: LayerGrid = field(default_factory=LayerGrid)
    kinds: tuple[str, ...] = (*KINDS, *LAYER_KINDS)
    checks: tuple[LinearCheck | AttentionCheck, ...] = CHECKS
    pool_bytes: int = POOL_BYTES
    more_time: float = 1.0  # of what two passes take, for what is repeated because memory was in another state
    note: str = ""


# For who waits for a first answer: what a dense model takes in bf16 and int8, at a fifth of the sizes. What else a
# model or a technique may take is missing, and whoever asks for it is told so.
QUICK = CalibrationPlan(
    linears=LinearGrid(formats=("bf16", "int8"), m=(1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 128, 512)),
    operators=OperatorGrid(
        tokens=(1, 4, 16, 64, 256, 1024),
        widths=(512, 2048),
        heads=(Heads(8, 4, 64), Heads(32, 8, 64)),
        loads=(
            *(Load(sequences, context) for sequences in (1, 4, 16) for context in (64, 256, 1024)),
            *(Load(sequences, 256, 5) for sequences in (1, 4, 16)),
            *(Load(1, new, new) for new in (32, 128, 512)),
            Load(4, 32, 32),
        ),
    ),
    host=HostGrid(sequences=(1, 4, 16)),
    kinds=tuple(kind for kind in KINDS if kind not in KV_KINDS),
    more_time=0.3,
    note="measured quickly: dense models in bf16 and int8 alone; `membound calibrate` measures all, at more sizes",
)


def calibrate(
    *,
    device: str = "cpu",
    threads: int | None = None,
    progress: Progress | None = None,
    plan: CalibrationPlan | None = None,
) -> Calibration:
    """Measures the kernels of `device` with `threads` threads, or as many as torch has.

    `progress` hears the fraction that is done and what is measured; `plan` says what, all if not given.
    Raises CalibrationError where two passes over a part differ by more than 20 %, three tries long.
    """
    plan = plan or CalibrationPlan()
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        return _Calibrator(kernels_for(device), device, plan).run(progress or (lambda fraction, text: None))
    finally:
        torch.set_num_threads(before)


class _Calibrator:
    """The probes of one set of kernels, and the calibration that they add up to."""

    def __init__(self, kernels: Kernels, device: str, plan: CalibrationPlan) -> None:
        self.kernels = kernels
        self.device = device
        self.plan = plan
        pool_bytes = min(plan.pool_bytes, int(_free_bytes(device) * POOL_SHARE) // 2**20 * 2**20)
        self.working_sets = [size for size in plan.working_sets if size <= pool_bytes]
        self.pool = pool = Pool.of(pool_bytes, device)
        stopwatch = Stopwatch(kernels, device)
        self.bandwidth = BandwidthProbe(kernels, stopwatch, pool)
        self.linears = LinearProbe(kernels, stopwatch, pool, plan.linears)
        self.operators = OperatorProbe(kernels, stopwatch, pool, plan.operators)
        self.host = HostProbe(kernels, pool, plan.host)
        self.layers = LayerProbe(kernels, stopwatch, plan.layers)
        self.watch = MemoryWatch() if watchable(device) else None

    def run(self, progress: Progress) -> Calibration:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        bandwidths = [
            Part(f"the bandwidth of {name}", len(sizes), partial(self.bandwidth.measure, sizes))
            for name, sizes in (
                ("the caches", [size for size in self.working_sets if size < MEMORY_FROM_BYTES]),
                ("memory", [size for size in self.working_sets if size >= MEMORY_FROM_BYTES]),
            )
            if sizes
        ]
        linears = {
            (format, cached): Part(
                f"{format} linears with weights from {'a cache' if cached else 'memory'}",
                self.plan.linears.size,
                partial(self.linears.measure, format, cached),
            )
            for format in self.linears.formats
            for cached in (False, True)
        }
        operators = {
            kind: Part(_words_of(kind), len(self.operators.amounts(kind)), partial(self.operators.measure, kind))
            for kind in KINDS
            if kind in self.plan.kinds and (kind not in KV_KINDS or not self.kernels.emulates_quantized_kv)
        }
        layers = {
            kind: Part(f"{kind} layers", len(self.layers.amounts(kind)), partial(self.layers.measure, kind))
            for kind in LAYER_KINDS
            if kind in self.plan.kinds
        }
        host = Part("planning and sampling", len(self.host.amounts()), self.host.measure)
        parts = [*bandwidths, *linears.values(), *operators.values(), *layers.values(), host]
        repeated = repeat(parts, progress, self.watch, self.plan.more_time)

        rates = (1 / np.concatenate([part.best() for part in bandwidths])).tolist()
        tables = {
            format: self.linears.table(linears[format, False].typical(), linears[format, True].typical())
            for format in self.linears.formats
        }
        costs = {kind: fit(self.operators.amounts(kind), part.typical()) for kind, part in operators.items()}
        costs |= {kind: fit(self.layers.amounts(kind), part.typical()) for kind, part in layers.items()}
        embed = costs["embed"].seconds["call"]
        costs["host"] = fit(self.host.amounts(), np.maximum(host.typical() - embed, 1e-7))
        calibration = Calibration(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=_machine(self.device),
            kind="gpu" if self.device.startswith("cuda") else "cpu",
            threads=torch.get_num_threads(),
            kernels=f"{self.kernels.name}: {self.kernels.describe()}",
            versions={"python": platform.python_version(), "torch": torch.__version__, "membound": _version()},
            memory_bytes=_memory_bytes(self.device),
            bandwidth=[
                BandwidthPoint(working_set_bytes=size, bytes_per_s=rate)
                for size, rate in zip(self.working_sets, rates, strict=True)
            ],
            linear=tables,
            operators=costs,
            repeatability=repeated.difference,
            residual=0.0,
            watched_bytes_per_s=repeated.memory_rate,
            notes=[
                *([self.plan.note] if self.plan.note else []),
                *([f"load average {load:.1f} when it began: other programs were running"] if load > BUSY_LOAD else []),
                *_unsettled(repeated),
            ],
        )
        progress(1.0, "checking the tables on other shapes")
        return calibration.model_copy(update={"residual": float(np.median(self._errors(calibration)))})

    def _errors(self, calibration: Calibration) -> list[float]:
        """Relative errors of the tables on the plan's checks, in the state of memory that the tables are of."""
        times = CalibratedTimes(hardware_of(calibration), calibration)
        errors = []
        patient_until_s = time.perf_counter() + PATIENCE_S
        for check in self.plan.checks:
            if self.watch is not None and calibration.watched_bytes_per_s is not None:
                left_s = max(0.0, patient_until_s - time.perf_counter())
                self.watch.settled(calibration.watched_bytes_per_s, left_s)
            for operator, working_set_bytes, measured_s in self._measured(check, times.activation_bytes):
                predicted_s = float(times.of(operator, working_set_bytes).time_s)
                errors.append(abs(predicted_s / measured_s - 1))
        return errors

    def _measured(self, check: LinearCheck | AttentionCheck, width: float) -> Iterator[tuple[Operator, float, float]]:
        """A check as an operator in a working set, with the seconds that it takes."""
        if isinstance(check, AttentionCheck):
            amounts = attention_amounts(check.heads, check.load, width)
            operator = Operator("check", "attention", calls=1, **amounts)  # type: ignore[arg-type]
            yield operator, self.pool.size_bytes, self.operators.attention_s(check.heads, check.load)
            return
        for format in self.plan.linears.formats[:2]:
            operator = linear("check", 1, check.m, check.n, check.k, PRECISIONS[format], width)
            for cached, working_set in ((False, self.pool.size_bytes), (True, CACHE_SET_BYTES)):
                if operator.weight_bytes <= working_set:
                    yield operator, working_set, self.linears.one_s(format, check.n, check.k, check.m, cached)


def _unsettled(repeated: Repeated) -> list[str]:
    """In words, what was measured while memory gave something else than mostly."""
    if not repeated.unsettled:
        return []
    return [
        f"memory changed between states of this machine: {len(repeated.unsettled)} parts were also measured in another "
        f"than that of {(repeated.memory_rate or 0) / 1e9:.0f} GB/s"
    ]


def _words_of(kind: str) -> str:
    """What is measured, for whoever waits: `attention over an fp8 cache`."""
    return f"attention over an {KV_KINDS[kind]} cache" if kind in KV_KINDS else kind.replace("_", " ")


def _machine(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    free = free_bytes()
    return int(free) if math.isfinite(free) else _memory_bytes(device) // 2


def _version() -> str:
    try:
        return metadata.version("membound")
    except metadata.PackageNotFoundError:
        return "unknown"
