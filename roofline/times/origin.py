"""Where do the times of a step come from: measurements of this device, or of a relative?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from membound.roofline.cost import OperatorCost
from membound.roofline.hardware import HardwareSpec
from membound.roofline.times.kernel_fits import KernelFit
from membound.roofline.times.kernels import KernelName, KernelTimes
from membound.roofline.times.operator import Times

Level = Literal["device", "kernel", "variant", "generation", "memory", "any"]
OriginKind = Literal["calibrated", "measured", "partly", "inherited"]

# Shares of a step's time from which on its kernels count as measured on the device, or as not measured there.
_NEARLY_ALL, _NEARLY_NONE = 0.95, 0.05


@dataclass(frozen=True)
class KernelOrigin:
    """The fit that a kernel's time comes from, how near to the device it was measured, and its share of the step.

    At level `kernel` the device was measured, but with another kernel than the `wanted` one; at level `variant` another
    of the same chip was.
    """

    wanted: KernelName
    fit: KernelFit
    level: Level
    share: float

    def to_json(self) -> dict[str, Any]:
        fit = self.fit
        return {
            "family": fit.family,
            "kernel": self.wanted.kernel,
            "fitted_kernel": fit.kernel,
            "library": fit.library,
            "scope": fit.scope,
            "level": self.level,
            "share": self.share,
            "rows": fit.rows,
            "median_error": fit.median_error,
            "spread": fit.spread,
            "sources": list(fit.sources),
        }


@dataclass(frozen=True)
class Origin:
    """What a step's times rest on.

    `calibrated`: tables of this very machine. `measured`: fits of published or own measurements of this device for
    nearly all of the time that kernels take; `partly` for some of it; `inherited` for next to none.
    """

    kind: OriginKind
    kernels: tuple[KernelOrigin, ...] = ()

    @property
    def measured_share(self) -> float:
        """The share of the kernels' time that fits of the device itself predict."""
        total = sum(kernel.share for kernel in self.kernels)
        return sum(kernel.share for kernel in self.kernels if kernel.level == "device") / total if total else 1.0

    @property
    def inherited_from(self) -> tuple[str, ...]:
        """The scopes other than the device, those of most time first."""
        return tuple(dict.fromkeys(kernel.fit.scope for kernel in self.kernels if kernel.level != "device"))


def origin_of(times: Times, operators: tuple[OperatorCost, ...], step_s: float) -> Origin:
    """The origin of the times of a step's operators, the kernels of most time first."""
    if not isinstance(times, KernelTimes):
        return Origin("calibrated")
    seconds: dict[KernelName, float] = {}
    for cost in operators:
        names = times.kernels_of(cost.operator)
        for name in names:
            seconds[name] = seconds.get(name, 0.0) + float(cost.total_s) / len(names)
    kernels = tuple(
        KernelOrigin(name, fit := times.fit(*name), level_of(fit, times.hardware, name.kernel), spent / step_s)
        for name, spent in sorted(seconds.items(), key=lambda item: -item[1])
    )
    share = Origin("partly", kernels).measured_share
    kind: OriginKind = "measured" if share >= _NEARLY_ALL else "inherited" if share <= _NEARLY_NONE else "partly"
    return Origin(kind, kernels)


def level_of(fit: KernelFit, hardware: HardwareSpec, kernel: str) -> Level:
    """How near to a device and one of its kernels a fit was measured."""
    if fit.scope == hardware.name:
        return "device" if fit.kernel == kernel else "kernel"
    wider: dict[str | None, Level] = {hardware.memory_kind: "memory", hardware.stack: "memory"}
    scopes = {**wider, hardware.generation: "generation"}
    return ({hardware.variant_of: "variant"} | scopes).get(fit.scope, "any")  # type: ignore[return-value]
