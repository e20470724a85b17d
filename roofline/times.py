"""How long does one operator take on a device, and which roof holds it?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from membound.roofline.calibration import Calibration, LinearTable
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec
from membound.roofline.operators import Operator
from membound.roofline.shape import Count


@dataclass(frozen=True)
class OperatorTime:
    """Seconds of one call, and what the bare roofs alone would ask: the largest of those says what binds."""

    time_s: Count
    memory_s: Count
    compute_s: Count
    overhead_s: Count


class Times(Protocol):
    """Turns operators into seconds on one device."""

    hardware: HardwareSpec
    activation_bytes: float
    relative_error: float

    def of(self, operator: Operator, working_set_bytes: float) -> OperatorTime:
        """Seconds of one call where the step as a whole reads `working_set_bytes`."""


# The share of a data sheet's rates that kernels reach, as fitted on published tables of bf16 operators: bandwidth
# 0.73-0.89, matrix rate 0.61-0.81 of peak (A100, H100, L40S, B200; aiconfigurator's measurements). One device's
# value is replaced by its own calibration; until then the interval says how wide that range is.
DATASHEET_BANDWIDTH_SHARE = 0.80
DATASHEET_MATRIX_SHARE = 0.70
DATASHEET_RELATIVE_ERROR = 0.30


class DatasheetTimes:
    """The plain roofline: max(FLOPs / rate, bytes / bandwidth) + launch, with typical shares of the data sheet."""

    def __init__(self, hardware: HardwareSpec) -> None:
        self.hardware = hardware
        self.activation_bytes = 4.0 if hardware.kind == "cpu" else 2.0
        self.relative_error = DATASHEET_RELATIVE_ERROR

    def of(self, operator: Operator, working_set_bytes: float) -> OperatorTime:
        hw = self.hardware
        memory_s = operator.bytes / (hw.bandwidth_bytes_per_s * DATASHEET_BANDWIDTH_SHARE)
        # Weight-only quantization computes in 16 bits after dequantizing in registers.
        compute_s = operator.flops / (hw.peak_flops("bf16") * DATASHEET_MATRIX_SHARE)
        overhead_s = 0.0 if operator.kind == "host" else hw.launch_s
        return OperatorTime(np.maximum(memory_s, compute_s) + overhead_s, memory_s, compute_s, overhead_s)


class CalibratedTimes:
    """Times from a machine's own tables, between their points by interpolation in logarithms."""

    def __init__(self, hardware: HardwareSpec, calibration: Calibration) -> None:
        self.hardware = hardware
        self.calibration = calibration
        self.activation_bytes = 4.0 if hardware.kind == "cpu" else 2.0
        self.relative_error = max(calibration.residual, calibration.repeatability)
        self._linears: dict[str, _LinearTimes] = {}

    def of(self, operator: Operator, working_set_bytes: float) -> OperatorTime:
        bandwidth = self.calibration.bandwidth_at(working_set_bytes)
        memory_s = operator.bytes / bandwidth
        if operator.kind == "linear":
            assert operator.precision is not None
            table = self._linear(operator.precision.name)
            slowness = self._slowness(bandwidth)
            time_s = table.time_s(operator.m, operator.n, operator.k, slowness)
            compute_s = operator.flops / self.calibration.matrix_flops(operator.precision.name)
            return OperatorTime(time_s, memory_s, compute_s, 0.0)
        cost = self.calibration.operators.get(operator.kind)
        if cost is None:
            raise MemboundError(
                f"the calibration of '{self.hardware.name}' has no operator '{operator.kind}'; run `membound calibrate`"
            )
        amounts = {
            "elements": operator.elements,
            "sequences": operator.sequences,
            "kv_bytes": operator.kv_bytes if operator.kind == "attention" else 0.0,
            "flops": operator.flops,
            "logits": operator.logits,
        }
        time_s = cost.time_s(**amounts)
        if operator.kind == "attention":
            compute_s = operator.flops * cost.seconds.get("flops", 0.0)
            return OperatorTime(time_s, memory_s, compute_s, cost.seconds.get("call", 0.0))
        return OperatorTime(time_s, 0.0, 0.0, time_s)

    def _linear(self, weight_format: str) -> _LinearTimes:
        if weight_format not in self._linears:
            if weight_format not in self.calibration.linear:
                known = ", ".join(self.calibration.linear)
                raise MemboundError(
                    f"the calibration of '{self.hardware.name}' has no {weight_format} weights; it has {known}"
                )
            self._linears[weight_format] = _LinearTimes(self.calibration.linear[weight_format])
        return self._linears[weight_format]

    def _slowness(self, bandwidth: float) -> float:
        """Where a bandwidth lies between the fastest cache (0) and memory (1), in seconds a byte."""
        fastest = max(point.bytes_per_s for point in self.calibration.bandwidth)
        slowest = self.calibration.memory_bandwidth
        if fastest <= slowest:
            return 1.0
        return float(np.clip((1 / bandwidth - 1 / fastest) / (1 / slowest - 1 / fastest), 0.0, 1.0))


class _LinearTimes:
    """Seconds of linears by trilinear interpolation of log seconds per FLOP in log n, log k, log m.

    Beyond the grid the nearest efficiency holds: seconds then grow with FLOPs.
    """

    def __init__(self, table: LinearTable) -> None:
        self._axes = tuple(np.log(np.array(axis, dtype=float)) for axis in (table.n, table.k, table.m))
        n, k, m = np.meshgrid(table.n, table.k, table.m, indexing="ij")
        self._log_per_flop = tuple(
            np.log(np.array(seconds) / (2.0 * n * k * m)) for seconds in (table.cache_s, table.memory_s)
        )

    def time_s(self, m: Count, n: int, k: int, slowness: float) -> Count:
        """Seconds between the two regimes: `slowness` 0 has the weights in cache, 1 in memory."""
        cached, uncached = (np.exp(self._interpolate(grid, m, n, k)) for grid in self._log_per_flop)
        seconds = ((1 - slowness) * cached + slowness * uncached) * (2.0 * n * k * np.asarray(m, dtype=float))
        return seconds if np.ndim(m) else float(seconds)

    def _interpolate(self, grid: NDArray[np.float64], m: Count, n: int, k: int) -> NDArray[np.float64]:
        for axis, value in zip(self._axes[:2], (n, k), strict=True):
            low, fraction = _bracket(axis, np.log(value))
            grid = grid[low] * (1 - fraction) + grid[low + 1] * fraction
        safe_m = np.maximum(np.asarray(m, dtype=float), 1.0)
        return np.interp(np.log(safe_m), self._axes[2], grid)


def _bracket(axis: NDArray[np.float64], value: float) -> tuple[int, float]:
    """The lower grid index and the fraction towards the next one, clipped to the grid."""
    low = int(np.clip(np.searchsorted(axis, value) - 1, 0, len(axis) - 2))
    fraction = (value - axis[low]) / (axis[low + 1] - axis[low])
    return low, float(np.clip(fraction, 0.0, 1.0))


def times_for(hardware: HardwareSpec) -> Times:
    """The best times that are known for a device: its calibration, else its data sheet."""
    if hardware.calibration is not None:
        return CalibratedTimes(hardware, hardware.calibration)
    return DatasheetTimes(hardware)
