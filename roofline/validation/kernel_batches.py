"""How long do the kernels of many rows take, one by one, under some parameters, and how long at least?

The prediction of a batch is one vectorised call. The fitter and `validate` read the same batches, so that nothing is
fitted that is not predicted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from membound.roofline.hardware import HardwareSpec
from membound.roofline.shape import Count
from membound.roofline.times import efficiency
from membound.roofline.times.kernel_fits import Family
from membound.roofline.validation.kernel_cases import NETWORK, KernelCase

Floats = NDArray[np.float64]

# Boost clocks exceed the data sheet a little (RTX 4090: up to 2.75 GHz where 2.52 is promised).
CLOCK_MARGIN = 1.09


@dataclass(frozen=True)
class KernelBatch:
    """Cases of one device, family, kernel, dtype and library, as arrays."""

    hardware: HardwareSpec
    family: Family
    kernel: str
    dtype: str
    library: str
    amounts: Mapping[str, Floats]
    measured_s: Floats
    cases: tuple[KernelCase, ...]

    def predict(self, p: Mapping[str, float]) -> Floats:
        """Seconds of every case under the parameters `p`."""
        return np.asarray(_PREDICTORS[self.family](p, self), dtype=float)

    def bound_s(self) -> Floats:
        """Seconds that no kernel can beat: what the cache cannot hold at full bandwidth, or the FLOPs at the full rate.

        A boost clock may exceed the data sheet's by a few percent (`CLOCK_MARGIN`), and GeForce cards double their rate
        with fp16 accumulation, whatever the kernel did.
        """
        if self.family == "collective":
            return self.amounts["bytes"] / (2.0 * CLOCK_MARGIN * self.amounts["bandwidth"])
        hw, (moved, flops) = self.hardware, _LEAST[self.family](self)
        dtype = hw.computes_in(self.dtype) or "fp16"
        rate = CLOCK_MARGIN * hw.peak_flops(dtype)
        if dtype in ("bf16", "fp16"):
            rate *= efficiency.fp16_accumulation_gain(hw)
        from_memory = np.maximum(moved - (hw.cache_bytes or 0), 0.0)
        return np.maximum(from_memory / hw.bandwidth_bytes_per_s, flops / rate)

    def possible(self) -> NDArray[np.bool_]:
        """Rows that are not faster than physics: the others were timed on other amounts than they say, or in cache."""
        return self.measured_s >= self.bound_s()

    def usual(self) -> NDArray[np.bool_]:
        """Rows that are not the best of many."""
        return np.array([not case.is_best_of_many for case in self.cases])

    @property
    def operation(self) -> str:
        """What a collective does, wherever it passes."""
        return self.kernel.removesuffix(NETWORK)

    def only(self, chosen: NDArray[np.bool_]) -> KernelBatch:
        """The batch of the chosen rows alone."""
        return replace(
            self,
            amounts={name: values[chosen] for name, values in self.amounts.items()},
            measured_s=self.measured_s[chosen],
            cases=tuple(case for case, keep in zip(self.cases, chosen, strict=True) if keep),
        )


def batches(cases: Iterable[KernelCase]) -> list[KernelBatch]:
    """Cases in batches that one call predicts."""
    groups: dict[tuple[Any, ...], list[KernelCase]] = defaultdict(list)
    for case in cases:
        groups[(case.hardware.name, case.family, case.kernel, case.dtype, case.library)].append(case)
    made = []
    for (_, family, kernel, dtype, library), members in groups.items():
        names = members[0].amounts
        amounts = {name: np.array([case.amounts[name] for case in members]) for name in names}
        measured = np.array([case.measured_s for case in members])
        made.append(KernelBatch(members[0].hardware, family, kernel, dtype, library, amounts, measured, tuple(members)))
    return made


def _rate(p: Mapping[str, float], batch: KernelBatch) -> float:
    dtype = batch.hardware.computes_in(batch.dtype) or "fp16"
    return efficiency.matrix_rate(p, batch.hardware, dtype)


def _least_gemm(batch: KernelBatch) -> tuple[Floats, Floats]:
    a = batch.amounts
    kept = np.where(a["sparse"] > 0, 0.5, 1.0)
    return _gemm_bytes(batch), 2.0 * a["m"] * a["n"] * a["k"] * kept


def _least_attention(batch: KernelBatch) -> tuple[Floats, Floats]:
    a = batch.amounts
    past = a["kv_len"] - a["q_len"]
    pairs = a["batch"] * a["heads"] * (a["q_len"] * past + a["q_len"] * (a["q_len"] + 1.0) / 2.0)
    moved = a["batch"] * a["kv_len"] * a["kv_heads"] * a["kv_dims"] * a["kv_bytes"]
    return moved, 2.0 * (a["head_dim"] + a["value_dim"]) * pairs


def _least_moe(batch: KernelBatch) -> tuple[Floats, Floats]:
    a = batch.amounts
    elements = 3.0 * a["intermediate"] / a["tp"] * a["hidden"]
    return a["least_active"] * elements * a["weight_bytes"], 2.0 * elements * a["pairs"]


def _least_elementwise(batch: KernelBatch) -> tuple[Floats, Floats]:
    return batch.amounts["bytes"], np.zeros_like(batch.amounts["bytes"])


_LEAST: dict[Family, Callable[[KernelBatch], tuple[Floats, Floats]]] = {
    "gemm": _least_gemm,
    "decode_attention": _least_attention,
    "prefill_attention": _least_attention,
    "moe": _least_moe,
    "elementwise": _least_elementwise,
}


def _gemm_bytes(batch: KernelBatch) -> Floats:
    a = batch.amounts
    return a["n"] * a["k"] * a["weight_bytes"] + a["m"] * (a["k"] * a["activation_bytes"] + 2.0 * a["n"])


def _gemm(p: Mapping[str, float], batch: KernelBatch) -> Count:
    a, hw = batch.amounts, batch.hardware
    moved = _gemm_bytes(batch)
    rate = _rate(p, batch)
    doubled = np.where(a["sparse"] > 0, efficiency.SPARSE_SPEEDUP, 1.0)
    cached = efficiency.cached_share(hw, moved) * a["warm"]
    return efficiency.gemm_s(p, hw, rate * doubled, a["m"], a["n"], a["k"], moved, cached)[0]


def _decode(p: Mapping[str, float], batch: KernelBatch) -> Count:
    a, hw = batch.amounts, batch.hardware
    streams = a["batch"] * a["kv_heads"]
    per_token = a["kv_dims"] * a["kv_bytes"]
    kv_tokens = streams * a["kv_len"]
    cached = efficiency.cached_share(hw, kv_tokens * per_token) * a["warm"]
    rows = a["q_len"] * a["heads"] / a["kv_heads"]
    pair_flops, latents = 2.0 * (a["head_dim"] + a["value_dim"]), a["latents"] > 0
    usual, shared = _rate(p, batch), _rate({**p, "matrix_share": efficiency.LATENTS_SHARE}, batch)
    rate, tile = np.where(latents, shared, usual), np.where(latents, efficiency.LATENTS_ROWS, efficiency.MIN_QUERY_ROWS)
    return efficiency.decode_attention_s(p, hw, rate, streams, rows, kv_tokens, per_token, pair_flops, cached, tile)[0]


def _prefill(p: Mapping[str, float], batch: KernelBatch) -> Count:
    a, hw = batch.amounts, batch.hardware
    tokens = a["batch"] * a["q_len"]
    past = a["kv_len"] - a["q_len"]
    attended = a["batch"] * (a["q_len"] * past + a["q_len"] * (a["q_len"] + 1.0) / 2.0)
    moved = a["batch"] * a["head_dim"] * (4.0 * a["heads"] * a["q_len"] + 4.0 * a["kv_heads"] * a["kv_len"])
    return efficiency.prefill_attention_s(
        p, hw, _rate(p, batch), a["heads"], tokens, a["batch"], attended, 4.0 * a["head_dim"], moved
    )[0]


def _moe_batch(p: Mapping[str, float], batch: KernelBatch) -> Count:
    a, hw = batch.amounts, batch.hardware
    n = a["intermediate"] / a["tp"]
    elements = 3.0 * n * a["hidden"]
    routed = a["moved_pairs"] * (4.0 * a["hidden"] + 6.0 * n) * 2.0
    return efficiency.moe_s(
        p, hw, _rate(p, batch), a["pairs"], a["active"], 2.0 * elements, elements * a["weight_bytes"], routed
    )[0]


def _elementwise(p: Mapping[str, float], batch: KernelBatch) -> Count:
    moved, hw = batch.amounts["bytes"], batch.hardware
    return efficiency.elementwise_s(p, hw, moved, efficiency.cached_share(hw, moved))[0]


def _collective_batch(p: Mapping[str, float], batch: KernelBatch) -> Count:
    a, operation = batch.amounts, batch.operation
    inside = efficiency.collective_s(p, operation, a["bytes"], a["ranks"], a["bandwidth"], False)[0]
    shared = efficiency.collective_s(p, operation, a["bytes"], a["ranks"], a["bandwidth"], True)[0]
    return np.where(a["shared"] > 0, shared, inside)


_PREDICTORS = {
    "gemm": _gemm,
    "decode_attention": _decode,
    "prefill_attention": _prefill,
    "moe": _moe_batch,
    "elementwise": _elementwise,
    "collective": _collective_batch,
}
