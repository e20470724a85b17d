"""How long does an operator take on the machine that was calibrated with micro-benchmarks?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec
from membound.roofline.hardware.calibration import (
    CACHE_SET_BYTES,
    Calibration,
    LinearTable,
    attention_over,
    recurrence_of,
)
from membound.roofline.models import ModelSpec
from membound.roofline.operators import Operator
from membound.roofline.shape import Count, StepShape
from membound.roofline.times.operator import HasTotal, MadeOf, OperatorTime, expert_moves_s


class CalibratedTimes(MadeOf):
    """Times from a machine's own tables, between their points by interpolation."""

    needs_working_set = True

    def __init__(self, hardware: HardwareSpec, calibration: Calibration) -> None:
        self.hardware = hardware
        self.calibration = calibration
        self.activation_bytes = 4.0 if hardware.kind == "cpu" else 2.0
        self.relative_error = max(calibration.residual, calibration.repeatability)
        self._linears: dict[str, _LinearTimes] = {}

    @property
    def _made_of(self) -> tuple[object, ...]:
        return self.hardware, self.calibration

    def spread_of(self, operator: Operator) -> float:
        return self.relative_error

    def waiting_s(self, costs: Sequence[HasTotal], model: ModelSpec, shape: StepShape) -> Count | None:
        return None

    def of(self, operator: Operator, working_set_bytes: float) -> OperatorTime:
        if operator.kind == "expert_moves":
            return expert_moves_s(operator, self.hardware)
        bandwidth = self.calibration.bandwidth_at(working_set_bytes)
        memory_s = operator.bytes / bandwidth
        if operator.kind == "linear":
            format = kernel_format(operator)
            table = self._linear(format)
            slowness = self._slowness(bandwidth)
            time_s = table.time_s(operator.m, operator.n, operator.k, slowness)
            compute_s = operator.flops / self.calibration.matrix_flops(format)
            return OperatorTime(time_s, memory_s, compute_s, 0.0)
        cost = self.calibration.operators.get(operator.kind)
        if operator.kind == "attention" and operator.heads is not None:
            cost = self.calibration.operators.get(attention_over(operator.heads.kv.values), cost)
        if operator.kind == "recurrent":
            cost = self.calibration.operators.get(recurrence_of(operator.mixer), cost)
        if cost is None:
            raise MemboundError(
                f"the calibration of '{self.hardware.name}' has no operator '{operator.kind}'; run `membound calibrate`"
            )
        time_s = cost.time_s(**_amounts(operator))
        if operator.kind == "moe":
            return self._moe(operator, time_s, memory_s)
        if operator.kind == "attention":
            compute_s = operator.flops * cost.seconds.get("flops", 0.0)
            return OperatorTime(time_s, memory_s, compute_s, cost.seconds.get("call", 0.0))
        return OperatorTime(time_s, 0.0, 0.0, time_s)

    def _moe(self, operator: Operator, routing_s: Count, memory_s: Count) -> OperatorTime:
        """Each expert that has tokens is a linear of its share of them; routing and gathering come on top.

        An expert's two matrices are taken as a square one of as many elements, because seconds go by bytes and FLOPs.
        """
        load, format = operator.experts, kernel_format(operator)
        assert load is not None, "a mixture says what its experts compute"
        side = max(1, round((load.flops_per_row / 2) ** 0.5))
        rows = load.pairs / np.maximum(load.active, 1e-9)
        # an expert's turn comes once a step, so that its weights are read from memory
        each_s = self._linear(format).time_s(rows, side, side, 1.0)
        compute_s = operator.flops / self.calibration.matrix_flops(format)
        return OperatorTime(routing_s + load.active * each_s, memory_s, compute_s, routing_s)

    def _linear(self, weight_format: str) -> _LinearTimes:
        if weight_format not in self._linears:
            if weight_format not in self.calibration.linear:
                known = ", ".join(self.calibration.linear)
                raise MemboundError(
                    f"the calibration of '{self.hardware.name}' has no {weight_format} weights; it has {known}; "
                    "run `membound calibrate` to measure what kernels there are now"
                )
            self._linears[weight_format] = _LinearTimes(self.calibration.linear[weight_format])
        return self._linears[weight_format]

    def _slowness(self, bandwidth: float) -> float:
        """Where a bandwidth lies between that of the tables' cached columns (0) and memory (1), in seconds a byte."""
        cached = self.calibration.bandwidth_at(CACHE_SET_BYTES)
        uncached = self.calibration.memory_bandwidth
        if cached <= uncached:
            return 1.0
        return float(np.clip((1 / bandwidth - 1 / cached) / (1 / uncached - 1 / cached), 0.0, 1.0))


class _LinearTimes:
    """Seconds of linears by trilinear interpolation of seconds in n, k and m.

    Seconds are a launch, bytes and FLOPs, so they are linear in each of the three wherever one roof holds, and a coarse
    grid is enough. Beyond the grid the nearest efficiency holds: seconds then grow with FLOPs. Below it the smallest
    shape's seconds hold, which are mostly launch.
    """

    def __init__(self, table: LinearTable) -> None:
        self._n, self._k, self._m = (np.array(axis, dtype=float) for axis in (table.n, table.k, table.m))
        self._seconds = np.array([table.cache_s, table.memory_s])

    def time_s(self, m: Count, n: int, k: int, slowness: float) -> Count:
        """Seconds between the two regimes: `slowness` 0 has the weights in cache, 1 in memory."""
        cached, uncached = self._seconds
        grid = (1 - slowness) * cached + slowness * uncached
        beyond = 1.0
        for axis, value in ((self._n, n), (self._k, k)):
            inside = float(np.clip(value, axis[0], axis[-1]))
            beyond *= max(1.0, value / inside)
            low, fraction = _bracket(axis, inside)
            grid = grid[low] * (1 - fraction) + grid[low + 1] * fraction
        tokens = np.maximum(np.asarray(m, dtype=float), 1.0)
        inside_m = np.clip(tokens, self._m[0], self._m[-1])
        seconds = np.interp(inside_m, self._m, grid) * (tokens / inside_m) * beyond
        return seconds if np.ndim(m) else float(seconds)


# Formats that have kernels of their own for activations in int8.
_WITH_INT8 = {"int8": "w8a8", "int4": "w4a8"}


def kernel_format(operator: Operator) -> str:
    """The kernels' name for the weights of a linear, under which a calibration has their times.

    Groups and scales differ within a format by a few percent of its bytes, which one table stands for.
    """
    weights, activations = operator.precision, operator.activations
    assert weights is not None, "a linear has weights"
    if weights.sparse:
        return "sparse24" if weights.values in ("bf16", "fp16") else weights.name
    if weights.values in _WITH_INT8 and activations is not None and activations.values == "int8":
        return _WITH_INT8[weights.values]
    return "bf16" if weights.values == "fp16" else weights.values


def _amounts(operator: Operator) -> dict[str, Count]:
    """What an operator's time grows with, in the terms of its calibrated cost."""
    if operator.kind == "attention":
        return {
            "sequences": operator.sequences,
            "kv_bytes": operator.kv_bytes,
            "flops": operator.flops,
            "activation_bytes": operator.activation_bytes,
        }
    if operator.kind == "host":
        return {"sequences": operator.sequences, "tokens": operator.elements, "logits": operator.logits}
    if operator.kind == "moe":
        load = operator.experts
        assert load is not None, "a mixture says what its experts compute"
        return {"experts": load.active, "elements": load.pairs}
    if operator.kind == "recurrent":
        return {
            "elements": operator.elements,
            "sequences": operator.sequences,
            "kv_bytes": operator.kv_bytes,
            "flops": operator.flops,
        }
    return {"elements": operator.elements}


def _bracket(axis: NDArray[np.float64], value: float) -> tuple[int, float]:
    """The lower grid index and the fraction towards the next one, clipped to the grid."""
    low = int(np.clip(np.searchsorted(axis, value) - 1, 0, len(axis) - 2))
    fraction = (value - axis[low]) / (axis[low + 1] - axis[low])
    return low, float(np.clip(fraction, 0.0, 1.0))
