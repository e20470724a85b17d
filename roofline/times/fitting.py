"""Which parameters of the kernels' times fit a set of measurements?

Robust least squares in logarithms, with few physical parameters and a prior: all devices together first, then each
generation around that, each device around its generation, each library around its device. A scope with few rows so
stays near the scope that holds it instead of following its noise. scipy does the minimisation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from membound.roofline.times.kernel_fits import ANY, FAMILIES, OWN_KERNELS, PER_GENERATION, Family, KernelFit
from membound.roofline.validation.kernel_batches import KernelBatch

Floats = NDArray[np.float64]
Across = Literal["devices", "sources"]

# Relative scatter of one row that is no news: two teams that time the same GEMM agree within 6 to 13 %
# (published noise floor), and a fit that goes below it follows noise.
ROW_SCATTER = 0.08
# How far (in ln) a device is from others by what no parameter says, and what a source timed on a device from what
# another did (two teams 6 to 13 %, one shape through three frameworks 8 to 11 %). However many rows it has, a device
# tells of others no more than a single row with that scatter does, and a source of other kernels on its device.
DEVICE_SCATTER, SOURCE_SCATTER = 0.2, 0.1
# A row that is further off than this many scatters counts less and less.
ROBUST_AT = 1.5


@dataclass(frozen=True)
class Parameter:
    """Where a parameter lies before anything is measured, how far it may be off (in ln), and what it cannot pass."""

    start: float
    width: float
    low: float
    high: float


_LAUNCH = Parameter(4e-6, 0.7, 1e-7, 1e-3)
_BANDWIDTH = Parameter(0.82, 0.12, 0.05, 1.0)
_MATRIX = Parameter(0.90, 0.15, 0.02, 1.2)
PARAMETERS: dict[Family, dict[str, Parameter]] = {
    "gemm": {
        "launch_s": _LAUNCH,
        "bandwidth_share": _BANDWIDTH,
        "matrix_share": _MATRIX,
        "wave_loss": Parameter(0.1, 0.7, 1e-3, 2.0),
        "cache_bytes_per_cycle": Parameter(12.0, 0.5, 2.0, 128.0),
    },
    # A handful of query rows fills a sixth of what the matrix unit works on at once (64 or 128 rows from Hopper on).
    "decode_attention": {
        "launch_s": Parameter(11e-6, 0.5, 1e-6, 1e-3),
        "bandwidth_share": Parameter(0.93, 0.06, 0.05, 1.0),
        "matrix_share": Parameter(0.18, 0.4, 0.02, 1.0),
        "tile_tokens": Parameter(48.0, 0.7, 1.0, 512.0),
        "half_streams": Parameter(0.4, 0.5, 0.02, 10.0),
        "cache_bytes_per_cycle": Parameter(36.0, 0.4, 2.0, 128.0),
    },
    # FlashAttention-3 reaches 740 of 989 TFLOP/s (its announcement on pytorch.org), of some 800 that power allows; a
    # unit of NVIDIA's does 16 exponentials a cycle (5e12 a second on a B200), a softmax needs more than those.
    "prefill_attention": {
        "launch_s": Parameter(12e-6, 0.4, 1e-6, 1e-3),
        "bandwidth_share": Parameter(0.80, 0.02, 0.3, 1.0),
        "matrix_share": Parameter(0.80, 0.2, 0.02, 1.2),
        "softmax_per_cycle": Parameter(14.0, 0.15, 2.0, 64.0),
        "masked_share": Parameter(0.03, 0.5, 0.005, 1.1),
        "tile_cycles": Parameter(15000.0, 0.2, 100.0, 100000.0),
        "wave_loss": Parameter(0.35, 0.5, 0.05, 3.0),
    },
    "moe": {
        "launch_s": Parameter(25e-6, 0.7, 2e-6, 1e-3),
        "bandwidth_share": Parameter(0.85, 0.1, 0.05, 1.0),
        "matrix_share": Parameter(0.7, 0.4, 0.02, 1.3),
        "pad_rows": Parameter(25.0, 0.4, 0.0, 128.0),
        "routing_share": Parameter(1.0, 0.5, 0.1, 6.0),
    },
    "elementwise": {
        "launch_s": Parameter(2.2e-6, 0.4, 3e-7, 1e-4),
        "bandwidth_share": Parameter(0.75, 0.3, 0.05, 1.0),
        "cache_bytes_per_cycle": Parameter(12.0, 0.5, 2.0, 128.0),
    },
    "collective": {
        "launch_s": Parameter(6e-6, 0.8, 5e-7, 1e-3),
        "hop_s": Parameter(8e-7, 0.8, 1e-9, 1e-4),
        "bandwidth_share": Parameter(0.72, 0.25, 0.02, 1.05),
        "small_loss": Parameter(1.2, 0.8, 0.0, 10.0),
        "contention": Parameter(1.9, 0.2, 0.5, 3.0),
    },
}


def prior_parameters(family: Family) -> dict[str, float]:
    """A family's parameters before anything was measured."""
    return {name: parameter.start for name, parameter in PARAMETERS[family].items()}


def fit_parameters(
    family: Family, batches: Sequence[KernelBatch], prior: Mapping[str, float], *, across: Across | None = None
) -> dict[str, float]:
    """The most likely parameters: rows against the model in ln, parameters against the prior in ln.

    A fit `across` devices or sources is for others than those it is made of: all rows of one weigh as much as one row
    with the scatter between them, as many rows do not make it a better witness of others. An empty list gives the
    prior back.
    """
    if not batches:
        return dict(prior)
    from scipy.optimize import least_squares

    names = list(PARAMETERS[family])
    bounds = [PARAMETERS[family][name] for name in names]
    centre = np.log([max(prior[name], 1e-12) for name in names])
    widths = np.array([bound.width for bound in bounds])
    weights = _weights(batches, across) if across else 1.0
    low = np.log([max(bound.low, 1e-12) for bound in bounds])
    high = np.log([bound.high for bound in bounds])
    measured = np.log(np.concatenate([batch.measured_s for batch in batches]))

    def residuals(point: Floats) -> Floats:
        p = dict(zip(names, np.exp(point), strict=True))
        predicted = np.log(np.concatenate([batch.predict(p) for batch in batches]))
        off = (predicted - measured) / ROW_SCATTER
        robust = np.sign(off) * np.sqrt(2.0 * ROBUST_AT**2 * (np.sqrt(1.0 + (off / ROBUST_AT) ** 2) - 1.0))
        return np.concatenate([weights * robust, (point - centre) / widths])

    start = np.clip(centre, low + 1e-6, high - 1e-6)
    found = least_squares(residuals, start, bounds=(low, high), x_scale=0.3, max_nfev=60)
    return {name: float(value) for name, value in zip(names, np.exp(found.x), strict=True)}


def _weights(batches: Sequence[KernelBatch], across: Across) -> Floats:
    """The square root of each row's weight: those of one device, or source, together weigh as one witness."""
    if across == "devices":
        witnesses = [batch.hardware.name for batch in batches for _ in batch.cases]
    else:
        witnesses = [case.row.text("source") for batch in batches for case in batch.cases]
    scatter = DEVICE_SCATTER if across == "devices" else SOURCE_SCATTER
    rows = Counter(witnesses)
    most = (ROW_SCATTER / scatter) ** 2
    return np.array([min(1.0, most / rows[witness]) ** 0.5 for witness in witnesses])


def errors(batches: Iterable[KernelBatch], p: Mapping[str, float]) -> Floats:
    """ln(predicted / measured) of every row."""
    return np.concatenate([np.log(batch.predict(p) / batch.measured_s) for batch in batches])


def _scopes_of(batch: KernelBatch) -> tuple[str, ...]:
    """The scopes that hold a batch, the widest first; the last is its device."""
    hardware = batch.hardware
    return ANY, hardware.memory_kind, hardware.stack, hardware.generation, hardware.name


_DEVICE = 4


def fit_all(batches: Sequence[KernelBatch]) -> list[KernelFit]:
    """Fits of every family and kernel that the batches hold, from all devices down to each with its libraries.

    Rows that beat the roofs are left out, because they were timed on other amounts than they state, and so are the
    best of a search over shapes.
    """
    batches = [batch.only(batch.possible() & batch.usual()) for batch in batches]
    batches = [batch for batch in batches if len(batch.measured_s)]
    made: list[KernelFit] = []
    for family in FAMILIES:
        of_family = [batch for batch in batches if batch.family == family]
        root = (
            fit_parameters(family, of_family, prior_parameters(family), across="devices")
            if of_family
            else prior_parameters(family)
        )
        for kernel in sorted({batch.kernel for batch in of_family}):
            mine = [batch for batch in of_family if batch.kernel == kernel]
            made += _fit_kernel(family, kernel, mine, root)
    return made


def _fit_kernel(
    family: Family, kernel: str, batches: Sequence[KernelBatch], root: Mapping[str, float]
) -> list[KernelFit]:
    made: list[KernelFit] = []
    parents: dict[tuple[str, str], Mapping[str, float]] = {}
    libraries = {batch.library for batch in batches}
    for level in range(_DEVICE + 1):
        for scope in sorted({_scopes_of(batch)[level] for batch in batches}):
            inside = [batch for batch in batches if _scopes_of(batch)[level] == scope]
            above = _scopes_of(inside[0])[level - 1] if level else ""
            if scope == above:
                continue
            around = parents.get((above, ANY), root)
            overall = _fit(family, kernel, scope, ANY, inside, around, "devices" if level < _DEVICE else "sources")
            parents[(scope, ANY)] = overall.parameters
            if family not in OWN_KERNELS or len(libraries) > 1 or ANY in libraries:
                made.append(overall)
            if level < _DEVICE - 1 and family in PER_GENERATION:
                continue
            for library in sorted({batch.library for batch in inside} - {ANY}):
                chosen = [batch for batch in inside if batch.library == library]
                near = parents.get((above, library), overall.parameters)
                fit = _fit(family, kernel, scope, library, chosen, near, "devices" if level < _DEVICE else None)
                parents[(scope, library)] = fit.parameters
                made.append(fit)
    return made


def _fit(
    family: Family,
    kernel: str,
    scope: str,
    library: str,
    batches: Sequence[KernelBatch],
    prior: Mapping[str, float],
    across: Across | None,
) -> KernelFit:
    p = fit_parameters(family, batches, prior, across=across)
    off = errors(batches, p)
    sources = sorted({case.row.text("source") for batch in batches for case in batch.cases})
    return KernelFit(
        family,
        kernel,
        scope,
        library,
        {name: float(f"{value:.4g}") for name, value in p.items()},
        len(off),
        float(f"{np.median(np.abs(np.expm1(off))):.3g}"),
        float(f"{np.quantile(np.abs(off), 0.8):.3g}"),
        tuple(sources),
    )
