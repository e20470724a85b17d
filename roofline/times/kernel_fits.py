"""Which fitted parameters do a device's kernels have? Those of the most closely related device that was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal, get_args

from membound.roofline.hardware import HardwareSpec
from membound.roofline.precision import Precision

Family = Literal["gemm", "decode_attention", "prefill_attention", "moe", "elementwise", "collective"]
FAMILIES: tuple[Family, ...] = get_args(Family)

ANY = "any"
# Families in which engines bring kernels of their own: what one engine's show of a format is not said of the others.
OWN_KERNELS: tuple[Family, ...] = ("gemm", "moe")
# Families whose kernels an engine rewrites for each generation: there its name says nothing beyond one.
PER_GENERATION: tuple[Family, ...] = ("decode_attention", "moe")


@dataclass(frozen=True, slots=True)
class KernelFit:
    """Parameters of a family on a scope, and how well they predicted the rows they were fitted on.

    `scope` is a device's name, a generation (`Hopper HBM`), a maker's devices with a kind of memory (`AMD HBM`), a kind
    of memory (`HBM`) or `any`; `kernel` the number format that the kernel works in (`bf16`, `fp8_block`, `w4a16`...),
    for collectives the operation; `library` the engine whose kernels they are, or `any`. `spread` is the 80 % quantile
    of |ln(predicted / measured)|: within the fitted rows for a device, between left-out devices for a wider scope.
    """

    family: Family
    kernel: str
    scope: str
    library: str
    parameters: Mapping[str, float]
    rows: int
    median_error: float
    spread: float
    sources: tuple[str, ...]


@cache
def published_fits() -> dict[tuple[str, str, str, str], KernelFit]:
    """The fits that ship with membound, by (family, kernel, scope, library)."""
    text = (resources.files("membound.data") / "efficiency" / "published.json").read_text("utf-8")
    return index_fits(json.loads(text)["fits"])


def index_fits(documents: list[dict[str, object]]) -> dict[tuple[str, str, str, str], KernelFit]:
    fits = [KernelFit(**{**d, "sources": tuple(d["sources"])}) for d in documents]  # type: ignore[arg-type]
    return {(fit.family, fit.kernel, fit.scope, fit.library): fit for fit in fits}


# A kernel that no table has is taken for the nearest one that has been measured.
_NEAREST_KERNEL = {
    "fp16": "bf16",
    "fp32": "bf16",
    "w6a16": "w8a16",
    "w3a16": "w4a16",
    "w2a16": "w4a16",
    "w4a8": "int8",
    "fp4": "nvfp4",
    "mxfp4": "nvfp4",
    "w8a16": "bf16",
    "w4a16": "bf16",
    "int8": "fp8",
    "nvfp4": "fp8",
    "fp8_block": "fp8",
    "fp8": "bf16",
    "alltoall": "allreduce",
    "allgather": "allreduce",
    "reducescatter": "allreduce",
    "sendrecv": "allreduce",
    **{f"{name}_network": name for name in ("allreduce", "alltoall", "allgather", "reducescatter", "sendrecv")},
    "layernorm": "rmsnorm",
    "rope": "rmsnorm",
    "act": "rmsnorm",
    "act_mul": "rmsnorm",
    "residual_add": "rmsnorm",
    "embedding": "rmsnorm",
}


def kernel_name(weights: Precision, dtype: str) -> str:
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


_FIRST_KERNEL = {"collective": "allreduce", "elementwise": "rmsnorm"}


def find_fit(
    fits: Mapping[tuple[str, str, str, str], KernelFit],
    hardware: HardwareSpec,
    family: Family,
    kernel: str,
    library: str = ANY,
) -> KernelFit:
    """The fit nearest to a device, a kernel and a library.

    The device comes before the one that it is a variant of, that before its generation, that before its maker's
    devices with the same kind of memory, those before all with it, and within each the library before `any`. A kernel
    that nobody measured is replaced by the nearest one that somebody did.
    """
    device = hardware.name
    scopes = (device, hardware.variant_of or device, hardware.generation, hardware.stack, hardware.memory_kind, ANY)
    wanted: str | None = kernel
    while wanted is not None:
        for scope in scopes:
            for known in (library, ANY):
                fit = fits.get((family, wanted, scope, known))
                if fit is not None:
                    return fit
        wanted = _NEAREST_KERNEL.get(wanted)
    return fits[(family, _FIRST_KERNEL.get(family, "bf16"), ANY, ANY)]


# How much wider a device's interval is that inherits from its generation, or from further: so much more were left-out
# devices off than fitted ones (`validation/generalisation.py` on the published operators).
_INHERITED_FROM_GENERATION, INHERITED_FROM_FURTHER = 1.6, 2.2


def spread_on(fit: KernelFit, hardware: HardwareSpec, kernel: str | None = None) -> float:
    """The fit's spread on a device, wider where the device inherits it, or `kernel` from another of its kernels."""
    if kernel not in (None, fit.kernel):
        return fit.spread * INHERITED_FROM_FURTHER
    if fit.scope in (hardware.name, hardware.variant_of):
        return fit.spread
    return fit.spread * (_INHERITED_FROM_GENERATION if fit.scope == hardware.generation else INHERITED_FROM_FURTHER)
