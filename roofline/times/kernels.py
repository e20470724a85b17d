"""How long does an operator take on a device whose kernels, or whose relatives' kernels, were measured and fitted?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from membound.roofline.hardware import HardwareSpec
from membound.roofline.hardware.links import hops
from membound.roofline.models import ModelSpec
from membound.roofline.operators import Operator
from membound.roofline.precision import Precision
from membound.roofline.precision.plan import compute_dtype
from membound.roofline.shape import Count, StepShape, is_there
from membound.roofline.times import efficiency
from membound.roofline.times.engines import EngineProfile, get_profile
from membound.roofline.times.kernel_fits import (
    INHERITED_FROM_FURTHER,
    Family,
    KernelFit,
    find_fit,
    kernel_name,
    published_fits,
    spread_on,
)
from membound.roofline.times.operator import HasTotal, MadeOf, OperatorTime, expert_moves_s

Fits = Mapping[tuple[str, str, str, str], KernelFit]

# The part of a launch that may pass while the kernel before is still running.
_HIDDEN_LAUNCH = 0.9


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


# What a captured kernel takes to start at most. Collectors time some kernels through their engine's Python, whose 60
# to 500 us a call (block-scaled fp8 linears in vLLM) the table gives to the kernel and a captured graph does not have;
# experts are several kernels.
_MOST_LAUNCH_S = {"gemm": 1.2e-5, "moe": 4.0e-5}
# Experts with a scale for a whole matrix run in the kernels of those with one for a block of it: the one table of the
# former (vLLM 0.24 with ModelOpt's kernel, Hopper) is five times slower, and nobody serves with it.
_EXPERTS_KERNEL = {"fp8": "fp8_block"}
# Kernels that unpack weights in registers before they multiply.
_WEIGHT_ONLY = ("w4a16", "w8a16", "w4a8")
# How much a bus that all devices share slows for each doubling of their number beyond two. The one machine in the
# operator table (L40S, no peer-to-peer) shows 1.9; end-to-end runs of others (TensorRT-LLM's and MLPerf's L40S) need
# less than a tenth of that time, so that a device's own table is followed and the catalog is not.
_USUAL_CONTENTION = 0.3
# Scores that are only compared have no exponential: a unit weighs and adds about so many a cycle (two of the 128 fused
# operations that it does, from memory).
_SCORES_PER_CYCLE = 64.0
# The share of a network's bandwidth that kernels for the messages of experts reach, small ones too: DeepEP on H100 and
# H800 with 400 Gb/s moves 43 to 47 of 50 GB/s, less what stays in the node (its legacy page, EP 32 and 64, and its
# low-latency kernels of 128 tokens). Tables of all-to-alls within a node say nothing of that.
_EXPERTS_NETWORK = {"bandwidth_share": 0.9, "small_loss": 0.0}


# vLLM's own layers of experts activate, quantize and sum the rows of all pairs of the tokens that a device has, those
# of other devices' experts too (its tables with moe_ep=8 against those of TensorRT-LLM's kernels, which leave them out
# and which it calls on Blackwell).
_WITH_ROWS_OF_OTHERS, _LEAVING_THEM_OUT = "vllm", "Blackwell"


class KernelName(NamedTuple):
    """What a table calls a kernel: the family, and the format or the operation that it is for."""

    family: Family
    kernel: str


class KernelTimes(MadeOf):
    """Times from fitted kernel efficiencies: of the device, or of the nearest relative that was measured."""

    needs_working_set = False

    def __init__(self, hardware: HardwareSpec, profile: EngineProfile | None = None, fits: Fits | None = None) -> None:
        self.hardware = hardware
        self.profile = profile or get_profile("graphs")
        self.activation_bytes = 4.0 if hardware.kind == "cpu" else 2.0
        self._fits = published_fits() if fits is None else fits
        self._found: dict[tuple[Family, str], KernelFit] = {}
        self._rates: dict[tuple[Precision, Precision], tuple[str, str]] = {}
        # An engine's spread was found on devices that are measured, and on CUDA's; any other may be further off.
        elsewhere = 1.0 if hardware.stack == hardware.memory_kind else INHERITED_FROM_FURTHER
        self.relative_error = max(elsewhere * self.profile.spread, self._spread(KernelName("gemm", "bf16")))

    @property
    def _made_of(self) -> tuple[object, ...]:
        return self.hardware, self.profile, self._fits

    def fit(self, family: Family, kernel: str) -> KernelFit:
        """The fit that a family's kernel takes on this device."""
        key = (family, kernel)
        if key not in self._found:
            self._found[key] = find_fit(self._fits, self.hardware, family, kernel, self.profile.library)
        return self._found[key]

    def _parameters(self, family: Family, kernel: str) -> Mapping[str, float]:
        """A fit's parameters without what its collector's host added to the launch."""
        parameters = self.fit(family, kernel).parameters
        most_s = _MOST_LAUNCH_S.get(family)
        if most_s is None or parameters["launch_s"] <= most_s:
            return parameters
        return {**parameters, "launch_s": most_s}

    def _spread(self, name: KernelName) -> float:
        return spread_on(self.fit(*name), self.hardware, name.kernel)

    def kernels_of(self, operator: Operator) -> tuple[KernelName, ...]:
        """The kernels that an operator runs in; none for the work of the host."""
        if operator.kind in ("linear", "moe"):
            assert operator.precision is not None and operator.activations is not None
            kernel, _ = self._kernel_of(operator.precision, operator.activations)
            if operator.kind == "moe":
                return (KernelName("moe", _EXPERTS_KERNEL.get(kernel, kernel)),)
            return (KernelName("gemm", kernel),)
        if operator.kind == "attention":
            assert operator.heads is not None
            decode = KernelName("decode_attention", _cache_kernel(operator.heads.kv))
            prefill = KernelName("prefill_attention", "bf16")
            parts = ((operator.decode, decode), (operator.prefill, prefill))
            return tuple(name for part, name in parts if np.any(np.asarray(part.sequences) > 0))
        if operator.kind == "collective":
            assert operator.collective is not None
            return (KernelName("collective", operator.collective.operation),)
        if operator.kind in ("host", "expert_moves"):
            return ()
        return (KernelName("elementwise", _ELEMENTWISE[operator.kind]),)

    def spread_of(self, operator: Operator) -> float:
        """How far off an operator's kernels may be: 80 % of measurements lie within; the host's is the engine's."""
        return max((self._spread(name) for name in self.kernels_of(operator)), default=self.profile.spread)

    def of(self, operator: Operator, working_set_bytes: float) -> OperatorTime:
        time = self._kernel(operator)
        if self.profile.gap_s == 0.0 or operator.kind == "host":
            return time
        # A kernel that starts before the one ahead of it ends hides its launch, never its work.
        gap: Count = np.maximum(self.profile.gap_s, -_HIDDEN_LAUNCH * time.overhead_s) * is_there(time.time_s)
        return OperatorTime(time.time_s + gap, time.memory_s, time.compute_s, time.overhead_s + gap, time.link_s)

    def waiting_s(self, costs: Sequence[HasTotal], model: ModelSpec, shape: StepShape) -> Count | None:
        """What launches take beyond the kernels that they overlap with, and kernels that are not fused."""
        profile = self.profile
        calls = sum(cost.operator.calls for cost in costs) + profile.extra_kernels * model.layers
        unfused_s = profile.extra_kernels * model.layers * self._elementwise_launch_s
        prefills = is_there(shape.prefill_sequences)
        waiting = unfused_s + profile.prefill_s * prefills
        if profile.graphs and np.all(np.asarray(shape.prefill_sequences) == 0):
            captured = shape.tokens <= profile.most_graph_tokens
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
        if operator.kind == "expert_moves":
            return expert_moves_s(operator, self.hardware)
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
            self._rates[weights, activations] = (kernel_name(weights, compute.dtype), compute.dtype)
        return self._rates[weights, activations]

    def _linear(self, operator: Operator) -> OperatorTime:
        assert operator.precision is not None and operator.activations is not None
        kernel, dtype = self._kernel_of(operator.precision, operator.activations)
        p = self._parameters("gemm", kernel)
        rate = efficiency.matrix_rate(p, self.hardware, dtype)
        fit = self.fit("gemm", kernel)
        if kernel in _WEIGHT_ONLY and (fit.kernel, fit.scope) != (kernel, self.hardware.name):
            rate *= efficiency.MIXED_INPUT_SHARE.get(self.hardware.architecture, 1.0)
        rate *= self._engine_share(operator.precision)
        if self.profile.fp16_accumulate and dtype in ("bf16", "fp16"):
            rate *= efficiency.fp16_accumulation_gain(self.hardware)
        if operator.precision.sparse and dtype in self.hardware.sparse_flops:
            rate *= efficiency.SPARSE_SPEEDUP
        time_s, memory_s, compute_s = efficiency.gemm_s(
            p, self.hardware, rate, operator.m, operator.n, operator.k, operator.bytes
        )
        overhead_s: Count = efficiency.launch_s(p, self.hardware)
        if kernel in _WEIGHT_ONLY and self.profile.weight_only_s:
            time_s, overhead_s = time_s + self.profile.weight_only_s, overhead_s + self.profile.weight_only_s
        time_s, memory_s = self._with_loads_in_flight(time_s, memory_s, overhead_s, operator.bytes)
        there = is_there(operator.m)  # a step without such rows does not run the kernel
        return OperatorTime(time_s * there, memory_s * there, compute_s, overhead_s * there)

    def _engine_share(self, weights: Precision) -> float:
        """What the engine's own linear kernels reach of the matrix rate that those of the tables do."""
        return self.profile.rate_share * (self.profile.quantized_rate_share if weights.width < 16 else 1.0)

    def _with_loads_in_flight(
        self, time_s: Count, memory_s: Count, overhead_s: Count, moved_bytes: Count
    ) -> tuple[Count, Count]:
        """Seconds of a kernel and of its memory, no less than the loads that the engine's kernels keep in flight take.

        Of CUDA's devices, on which this was seen: Little's law, with a latency in cycles that differs little.
        """
        each, device = self.profile.unit_bytes_per_cycle, self.hardware
        if each is None or device.vendor != "NVIDIA" or device.compute_units is None or device.clock_hz is None:
            return time_s, memory_s
        least_s = moved_bytes / (each * device.compute_units * device.clock_hz)
        return np.maximum(time_s, least_s + overhead_s), np.maximum(memory_s, least_s)

    def _attention(self, operator: Operator) -> OperatorTime:
        heads = operator.heads
        assert heads is not None
        kernel = _cache_kernel(heads.kv)
        dtype = self._scores_dtype(heads.kv) if heads.scores_only else self._plain_dtype
        parts = []
        if np.any(np.asarray(operator.decode.sequences) > 0):
            p = self.fit("decode_attention", kernel).parameters
            if heads.latents:
                p = {**p, "matrix_share": efficiency.LATENTS_SHARE}
            part = operator.decode
            streams = part.sequences * heads.kv_heads
            rows = part.tokens / np.maximum(part.sequences, 1e-9) * heads.heads / heads.kv_heads
            rate = efficiency.matrix_rate(p, self.hardware, dtype)
            times = efficiency.decode_attention_s(
                p,
                self.hardware,
                rate,
                streams,
                rows,
                part.kv_tokens * heads.kv_heads,
                heads.kv_bytes_per_token,
                heads.flops_per_pair,
                rows_of_a_tile=efficiency.LATENTS_ROWS if heads.latents else efficiency.MIN_QUERY_ROWS,
            )
            parts.append((part.sequences, times, efficiency.launch_s(p, self.hardware)))
        if np.any(np.asarray(operator.prefill.sequences) > 0):
            p = self.fit("prefill_attention", "bf16").parameters
            if heads.scores_only:
                p = {**p, "softmax_per_cycle": _SCORES_PER_CYCLE}
            part = operator.prefill
            rate = efficiency.matrix_rate(p, self.hardware, dtype)
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
                operator.tiles,
            )
            parts.append((part.sequences, times, efficiency.launch_s(p, self.hardware)))
        total = OperatorTime(0.0, 0.0, 0.0, 0.0)
        for sequences, (time_s, memory_s, compute_s), overhead_s in parts:
            there = is_there(sequences)
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

    def _scores_dtype(self, keys: Precision) -> str:
        """What scores over keys of this format are multiplied in, where the device has it."""
        return keys.name if self.hardware.computes_in(keys.name) else self._plain_dtype

    def _moe(self, operator: Operator) -> OperatorTime:
        load = operator.experts
        assert load is not None and operator.precision is not None and operator.activations is not None
        _, dtype = self._kernel_of(operator.precision, operator.activations)
        p = self._parameters(*self.kernels_of(operator)[0])
        share = self._engine_share(operator.precision) if self.profile.experts_as_linears else 1.0
        moved: Count = operator.activation_bytes
        if self.profile.library == _WITH_ROWS_OF_OTHERS and self.hardware.architecture != _LEAVING_THEM_OUT:
            moved = moved * np.maximum(load.present / np.maximum(load.pairs, 1e-9), 1.0)
        time_s, memory_s, compute_s = efficiency.moe_s(
            p,
            self.hardware,
            efficiency.matrix_rate(p, self.hardware, dtype) * share,
            load.pairs,
            load.active,
            load.flops_per_row,
            load.bytes_per_expert,
            moved,
        )
        return OperatorTime(time_s, memory_s, compute_s, efficiency.launch_s(p, self.hardware))

    def _collective(self, operator: Operator) -> OperatorTime:
        message = operator.collective
        assert message is not None
        fit = self.fit("collective", message.operation)
        network = self.fit("collective", f"{message.operation}_network")
        p: Mapping[str, float] = fit.parameters
        if _is_published(fit):
            p = {**p, "contention": min(p.get("contention", 0.0), _USUAL_CONTENTION)}
        beyond = p if _is_published(network) else network.parameters
        time_s: Count = 0.0
        link_s: Count = 0.0
        together = message.operation == "alltoall"  # what crosses the network is passed on while more of it comes
        sent = (message.operation, message.message_bytes, message.ranks, message.copies, message.stride, message.groups)
        for hop in hops(self.hardware, *sent):
            on_it = beyond if hop.beyond_node else p
            if together and hop.beyond_node:
                on_it = {**on_it, **_EXPERTS_NETWORK}
            one_s, sent_s = efficiency.collective_s(
                on_it,
                message.operation,
                hop.message_bytes,
                float(hop.ranks),
                hop.link.bandwidth_bytes_per_s,
                hop.shared,
            )
            one_s, sent_s = (one_s + hop.link.latency_s * hop.beyond_node) * hop.share, sent_s * hop.share
            time_s = np.maximum(time_s, one_s) if together else time_s + one_s
            link_s = np.maximum(link_s, sent_s) if together else link_s + sent_s
        there = is_there(message.message_bytes)  # where there is nothing to send nothing is sent
        return OperatorTime(time_s * there, 0.0, 0.0, (time_s - link_s) * there, link_s * there)


def _is_published(fit: KernelFit) -> bool:
    return published_fits().get((fit.family, fit.kernel, fit.scope, fit.library)) is fit


def _cache_kernel(kv: Precision) -> str:
    """How the published tables call attention over a cache of this format."""
    return "fp8" if kv.width <= 8 else "bf16"
