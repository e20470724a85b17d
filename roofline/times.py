"""How long does one operator take on a device, and which roof holds it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from membound.roofline import efficiency
from membound.roofline.calibration import CACHE_SET_BYTES, Calibration, LinearTable
from membound.roofline.efficiency import Family, KernelFit, find_fit, published_fits
from membound.roofline.engines import EngineProfile, get_profile
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec
from membound.roofline.links import hops
from membound.roofline.models import ModelSpec
from membound.roofline.operators import Operator
from membound.roofline.precision import Precision
from membound.roofline.precision_plan import compute_dtype
from membound.roofline.shape import Count, StepShape

# The part of a launch that may pass while the kernel before is still running.
_HIDDEN_LAUNCH = 0.9


def _is_there(amount: Count) -> Count:
    """1 where there is anything, else 0."""
    return np.asarray(amount > 0, dtype=np.float64) if np.ndim(amount) else float(amount > 0)


Fits = Mapping[tuple[str, str, str, str], KernelFit]


@dataclass(frozen=True)
class OperatorTime:
    """Seconds of one call, and what the bare roofs alone would ask: the largest of those says what binds."""

    time_s: Count
    memory_s: Count
    compute_s: Count
    overhead_s: Count
    link_s: Count = 0.0


class HasTotal(Protocol):
    """An operator with the seconds of all its calls."""

    @property
    def operator(self) -> Operator: ...

    @property
    def total_s(self) -> Count: ...


class Times(Protocol):
    """Turns operators into seconds on one device."""

    hardware: HardwareSpec
    activation_bytes: float
    relative_error: float

    needs_working_set: bool

    def of(self, operator: Operator, working_set_bytes: float) -> OperatorTime:
        """Seconds of one call where the step as a whole reads `working_set_bytes`."""

    def waiting_s(self, costs: Sequence[HasTotal], model: ModelSpec, shape: StepShape) -> Count | None:
        """Seconds that the device waits for the host beyond the operators' own, None where nothing is known of it."""


# Elementwise kernels of the step under the names of the published tables.
_ELEMENTWISE = {
    "rms_norm": "rmsnorm",
    "add_rms_norm": "rmsnorm",
    "rope_and_store": "rope",
    "silu_mul": "act_mul",
    "embed": "embedding",
    "scores": "softmax",
    "recurrent": "act_mul",
}


class KernelTimes:
    """Times from fitted kernel efficiencies: of the device, or of the nearest relative that was measured."""

    needs_working_set = False

    def __init__(self, hardware: HardwareSpec, profile: EngineProfile | None = None, fits: Fits | None = None) -> None:
        self.hardware = hardware
        self.profile = profile or get_profile("graphs")
        self.activation_bytes = 4.0 if hardware.kind == "cpu" else 2.0
        self._fits = published_fits() if fits is None else fits
        self._found: dict[tuple[Family, str], KernelFit] = {}
        self._rates: dict[tuple[Precision, Precision], tuple[str, str]] = {}
        # What a device that nobody measured may be off by beyond its relatives' spread.
        self.relative_error = max(self.profile.spread, self.fit("gemm", "bf16").spread)

    @property
    def measured_device(self) -> bool:
        """Whether the device's own kernels are among the fits."""
        return self.fit("gemm", "bf16").scope == self.hardware.name

    def fit(self, family: Family, kernel: str) -> KernelFit:
        """The fit that a family's kernel takes on this device."""
        key = (family, kernel)
        if key not in self._found:
            self._found[key] = find_fit(self._fits, self.hardware, family, kernel, self.profile.library)
        return self._found[key]

    def fits_of(self, operator: Operator) -> tuple[KernelFit, ...]:
        """The fits that an operator's time comes from; none for the work of the host."""
        if operator.kind in ("linear", "moe"):
            assert operator.precision is not None and operator.activations is not None
            kernel, _ = self._kernel_of(operator.precision, operator.activations)
            return (self.fit("gemm" if operator.kind == "linear" else "moe", kernel),)
        if operator.kind == "attention":
            assert operator.heads is not None
            decode = self.fit("decode_attention", _cache_kernel(operator.heads.kv))
            prefill = self.fit("prefill_attention", "bf16")
            parts = ((operator.decode, decode), (operator.prefill, prefill))
            return tuple(fit for part, fit in parts if np.any(np.asarray(part.sequences) > 0))
        if operator.kind == "collective":
            assert operator.collective is not None
            return (self.fit("collective", operator.collective.operation),)
        return () if operator.kind == "host" else (self.fit("elementwise", _ELEMENTWISE[operator.kind]),)

    def of(self, operator: Operator, working_set_bytes: float) -> OperatorTime:
        time = self._kernel(operator)
        if self.profile.gap_s == 0.0 or operator.kind == "host":
            return time
        # A kernel that starts before the one ahead of it ends hides its launch, never its work.
        gap: Count = np.maximum(self.profile.gap_s, -_HIDDEN_LAUNCH * time.overhead_s) * _is_there(time.time_s)
        return OperatorTime(time.time_s + gap, time.memory_s, time.compute_s, time.overhead_s + gap, time.link_s)

    def waiting_s(self, costs: Sequence[HasTotal], model: ModelSpec, shape: StepShape) -> Count | None:
        """What launches take beyond the kernels that they overlap with, and kernels that are not fused."""
        profile = self.profile
        calls = sum(cost.operator.calls for cost in costs) + profile.extra_kernels * model.layers
        unfused_s = profile.extra_kernels * model.layers * self._elementwise_launch_s
        prefills = _is_there(shape.prefill_sequences)
        waiting = unfused_s + profile.prefill_s * prefills
        if profile.graphs and np.all(np.asarray(shape.prefill_sequences) == 0):
            captured = shape.sequences <= profile.most_graph_sequences
            if np.all(captured):
                return waiting
            launching: Count = np.where(captured, 0.0, 1.0)
        else:
            launching = prefills if profile.graphs else 1.0
        device_s = sum((cost.total_s for cost in costs), start=0.0) + unfused_s
        return waiting + launching * np.maximum(calls * profile.launch_s - device_s, 0.0)

    @cached_property
    def _elementwise_launch_s(self) -> float:
        return efficiency.launch_s(self.fit("elementwise", "rmsnorm").parameters, self.hardware)

    def _kernel(self, operator: Operator) -> OperatorTime:
        if operator.kind == "linear":
            return self._linear(operator)
        if operator.kind == "attention":
            return self._attention(operator)
        if operator.kind == "moe":
            return self._moe(operator)
        if operator.kind == "collective":
            return self._collective(operator)
        if operator.kind == "host":
            seconds = self.profile.step_s + self.profile.sequence_s * operator.sequences
            return OperatorTime(seconds, 0.0, 0.0, seconds)
        p = self.fit("elementwise", _ELEMENTWISE[operator.kind]).parameters
        time_s, memory_s = efficiency.elementwise_s(p, self.hardware, operator.bytes)
        return OperatorTime(time_s, memory_s, 0.0, efficiency.launch_s(p, self.hardware))

    def _kernel_of(self, weights: Precision, activations: Precision) -> tuple[str, str]:
        """The fitted kernel of two formats, and the dtype that the device multiplies them in."""
        if (weights, activations) not in self._rates:
            compute = compute_dtype(weights, activations, self.hardware)
            self._rates[weights, activations] = (_kernel_name(weights, compute.dtype), compute.dtype)
        return self._rates[weights, activations]

    def _linear(self, operator: Operator) -> OperatorTime:
        assert operator.precision is not None and operator.activations is not None
        kernel, dtype = self._kernel_of(operator.precision, operator.activations)
        p = self.fit("gemm", kernel).parameters
        rate = efficiency.matrix_rate(p, self.hardware, dtype)
        if kernel in ("w4a16", "w8a16") and self.fit("gemm", kernel).scope != self.hardware.name:
            rate *= efficiency.MIXED_INPUT_SHARE.get(self.hardware.architecture, 1.0)
        rate *= self.profile.rate_share
        if self.profile.fp16_accumulate and dtype in ("bf16", "fp16"):
            rate *= efficiency.fp16_accumulation_gain(self.hardware)
        if operator.precision.sparse and dtype in self.hardware.sparse_flops:
            rate *= efficiency.SPARSE_SPEEDUP
        time_s, memory_s, compute_s = efficiency.gemm_s(
            p, self.hardware, rate, operator.m, operator.n, operator.k, operator.bytes
        )
        overhead_s: Count = efficiency.launch_s(p, self.hardware)
        if np.ndim(operator.m):
            # Of many steps in one call, those without such rows do not run the kernel.
            there = _is_there(operator.m)
            time_s, memory_s, overhead_s = time_s * there, memory_s * there, overhead_s * there
        return OperatorTime(time_s, memory_s, compute_s, overhead_s)

    def _attention(self, operator: Operator) -> OperatorTime:
        heads = operator.heads
        assert heads is not None
        kernel = _cache_kernel(heads.kv)
        parts = []
        if np.any(np.asarray(operator.decode.sequences) > 0):
            p = self.fit("decode_attention", kernel).parameters
            part = operator.decode
            streams = part.sequences * heads.kv_heads
            rows = part.tokens / np.maximum(part.sequences, 1e-9) * heads.heads / heads.kv_heads
            rate = efficiency.matrix_rate(p, self.hardware, self._plain_dtype)
            times = efficiency.decode_attention_s(
                p,
                self.hardware,
                rate,
                streams,
                rows,
                part.kv_tokens * heads.kv_heads,
                heads.kv_bytes_per_token,
                heads.flops_per_pair,
            )
            parts.append((part.sequences, times, efficiency.launch_s(p, self.hardware)))
        if np.any(np.asarray(operator.prefill.sequences) > 0):
            p = self.fit("prefill_attention", "bf16").parameters
            part = operator.prefill
            rate = efficiency.matrix_rate(p, self.hardware, self._plain_dtype)
            moved = part.kv_tokens * heads.kv_heads * heads.kv_bytes_per_token
            moved = moved + part.tokens * heads.heads * heads.qk_and_v_dims * self.activation_bytes
            times = efficiency.prefill_attention_s(
                p,
                self.hardware,
                rate,
                heads.heads,
                part.tokens,
                part.sequences,
                part.attended,
                heads.flops_per_pair,
                moved,
            )
            parts.append((part.sequences, times, efficiency.launch_s(p, self.hardware)))
        total = OperatorTime(0.0, 0.0, 0.0, 0.0)
        for sequences, (time_s, memory_s, compute_s), overhead_s in parts:
            there = _is_there(sequences)
            total = OperatorTime(
                total.time_s + time_s * there,
                total.memory_s + memory_s * there,
                total.compute_s + compute_s * there,
                total.overhead_s + overhead_s * there,
            )
        return total

    @property
    def _plain_dtype(self) -> str:
        return "bf16" if self.hardware.computes_in("bf16") else "fp16"

    def _moe(self, operator: Operator) -> OperatorTime:
        load = operator.experts
        assert load is not None and operator.precision is not None and operator.activations is not None
        kernel, dtype = self._kernel_of(operator.precision, operator.activations)
        p = self.fit("moe", kernel).parameters
        time_s, memory_s, compute_s = efficiency.moe_s(
            p,
            self.hardware,
            efficiency.matrix_rate(p, self.hardware, dtype),
            load.pairs,
            load.active,
            load.flops_per_row,
            load.bytes_per_expert,
            operator.activation_bytes,
        )
        return OperatorTime(time_s, memory_s, compute_s, efficiency.launch_s(p, self.hardware))

    def _collective(self, operator: Operator) -> OperatorTime:
        message = operator.collective
        assert message is not None
        p = self.fit("collective", message.operation).parameters
        time_s: Count = 0.0
        link_s: Count = 0.0
        for hop in hops(self.hardware, message.operation, message.message_bytes, message.ranks):
            one_s, sent_s = efficiency.collective_s(
                p, message.operation, hop.message_bytes, float(hop.ranks), hop.link.bandwidth_bytes_per_s, hop.shared
            )
            time_s, link_s = time_s + one_s + hop.link.latency_s * hop.beyond_node, link_s + sent_s
        return OperatorTime(time_s, 0.0, 0.0, time_s - link_s, link_s)


def _cache_kernel(kv: Precision) -> str:
    """How the published tables call attention over a cache of this format."""
    return "fp8" if kv.width <= 8 else "bf16"


def _kernel_name(weights: Precision, dtype: str) -> str:
    """How the published tables call a kernel of these weights that multiplies in `dtype`."""
    if dtype in ("fp8", "int8", "fp4", "int4") and weights.width < 16:
        if dtype == "fp8":
            if weights.width <= 4:
                return "w4a8"
            return "fp8_block" if "block" in weights.name else "fp8"
        return "nvfp4" if dtype == "fp4" else "int8"
    if weights.width >= 16:
        return "fp32" if dtype in ("fp32", "tf32") else "bf16"
    return "w4a16" if weights.width <= 5 else "w8a16"


class RoofTimes:
    """The bare roofs: every operator at full bandwidth, full rate and full link, and nothing else. A lower bound."""

    needs_working_set = False
    relative_error = 0.0

    def __init__(self, hardware: HardwareSpec) -> None:
        self.hardware = hardware
        self.activation_bytes = 4.0 if hardware.kind == "cpu" else 2.0

    def waiting_s(self, costs: Sequence[HasTotal], model: ModelSpec, shape: StepShape) -> Count | None:
        return None

    def of(self, operator: Operator, working_set_bytes: float) -> OperatorTime:
        if operator.collective is not None:
            link = self.hardware.scale_up or self.hardware.scale_out or self.hardware.host
            link_s = operator.link_bytes / link.bandwidth_bytes_per_s if link else 0.0
            return OperatorTime(link_s, 0.0, 0.0, 0.0, link_s)
        # Activations may stay in the cache from one kernel to the next; weights and KV have to come from memory.
        memory_s = (operator.weight_bytes + operator.kv_bytes) / self.hardware.bandwidth_bytes_per_s
        compute_s = operator.flops / max(self.hardware.matrix_flops.values())
        return OperatorTime(np.maximum(memory_s, compute_s), memory_s, compute_s, 0.0)


class CalibratedTimes:
    """Times from a machine's own tables, between their points by interpolation."""

    needs_working_set = True

    def __init__(self, hardware: HardwareSpec, calibration: Calibration) -> None:
        self.hardware = hardware
        self.calibration = calibration
        self.activation_bytes = 4.0 if hardware.kind == "cpu" else 2.0
        self.relative_error = max(calibration.residual, calibration.repeatability)
        self._linears: dict[str, _LinearTimes] = {}

    def waiting_s(self, costs: Sequence[HasTotal], model: ModelSpec, shape: StepShape) -> Count | None:
        return None

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
        time_s = cost.time_s(**_amounts(operator))
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
    return {"elements": operator.elements}


def _bracket(axis: NDArray[np.float64], value: float) -> tuple[int, float]:
    """The lower grid index and the fraction towards the next one, clipped to the grid."""
    low = int(np.clip(np.searchsorted(axis, value) - 1, 0, len(axis) - 2))
    fraction = (value - axis[low]) / (axis[low + 1] - axis[low])
    return low, float(np.clip(fraction, 0.0, 1.0))


def times_for(hardware: HardwareSpec, profile: str | EngineProfile = "graphs") -> Times:
    """The best times that are known for a device: its own calibration, else the kernels of it or of its relatives."""
    if hardware.calibration is not None:
        return CalibratedTimes(hardware, hardware.calibration)
    # Reading tables and fitting come with this module, which a calibrated machine never needs.
    from membound.roofline.foreign import fits_for

    return KernelTimes(hardware, get_profile(profile) if isinstance(profile, str) else profile, fits_for(hardware))
