"""What does a table of measurements say about a device that is not at hand?

Its kernels are fitted around what is published of the device or of its nearest relatives, so that a few rows move the
parameters that they show and leave the others. The fits of a device lie in one file of the user's home and come before
the published ones wherever that device is predicted.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import (
    HardwareSpec,
    get_hardware,
    kept_as,
    normalised,
    read_hardware,
    user_hardware_folder,
)
from membound.roofline.home import calibration_lock_path, device_fits_path, file_stem
from membound.roofline.reading.files import expanded, locked, read_bytes, write_files
from membound.roofline.times.device_fits import (
    DamagedError,
    DeviceFits,
    KeptRow,
    Residual,
    SourceTable,
    kept_path,
)
from membound.roofline.times.fitting import ROW_SCATTER, errors, fit_parameters, prior_parameters
from membound.roofline.times.kernel_fits import ANY, FAMILIES, Family, KernelFit, find_fit, published_fits
from membound.roofline.validation.kernel_batches import KernelBatch, batches
from membound.roofline.validation.kernel_cases import KernelCase, case_of
from membound.roofline.validation.tables import OPERATOR_COLUMNS, Row, Table, read_table

# A time that beats the roofs by this factor, or takes so many times as long as a kernel of such a device, is no time in
# microseconds.
MOST_TOO_FAST, MOST_TOO_SLOW = 3.0, 1000.0
# Rows that are out of all proportion are named one by one, up to so many.
MOST_NAMED = 5
# How far (in ln) other rows are off where a single one was fitted: about what a fit inherited from another generation
# is; it falls as the standard error of a mean does, and reaches the scatter of timings at about 20 rows.
ONE_ROW_SPREAD = 0.35
# Of fewer rows a fit says so.
FEW_ROWS = 8

# What a table's device is called that nobody described.
_DESCRIBE = "; a device that is not known is described by a YAML file, and given by --device mine.yaml"


@dataclass(frozen=True)
class ForeignCalibration:
    """What a table gave: the fits of each device in it, the files that hold them, and why rows were left out."""

    devices: tuple[DeviceFits, ...]
    paths: tuple[Path, ...]
    left_out: dict[str, int]
    notes: tuple[str, ...] = ()


def calibrate_from(path: Path, device: str | None = None) -> ForeignCalibration:
    """Fits and keeps the kernels of every device in a table of operators, or of `device` alone.

    `device` is a name of the catalog, or a YAML file with the data sheet of a device whose name or alias stands in the
    table's `gpu` column; that file is then kept among the user's devices. Raises MemboundError with one sentence for a
    table that is not one of operators, for a device without rows and where no row can be fitted.
    """
    table = read_table(path)
    if table.schema != "operators":
        raise MemboundError(
            f"table '{path}' holds end-to-end measurements, from which kernels cannot be told apart; "
            f"give a table of single operators with the columns {', '.join(OPERATOR_COLUMNS)}"
        )
    sheet = expanded(device, "hardware file") if device and device.endswith((".yaml", ".yml")) else None
    rows = table.rows if device is None else _rows_of(table, device, sheet)
    cases, reasons = _cases(rows)
    usable = _usable(cases, reasons)
    left_out = dict(reasons.most_common())
    if not usable:
        reason = next(iter(left_out))
        unknown = _DESCRIBE if reason.startswith("hardware") and "is unknown" in reason else ""
        raise MemboundError(f"table '{path}' has no row that can be fitted: {reason}{unknown}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    try:
        with locked(calibration_lock_path()):
            return _keep(usable, path.name, digest, sheet, left_out)
    except OSError as error:
        first = next(iter(usable))
        raise MemboundError(
            f"calibration '{device_fits_path(first).parent}' cannot be written ({error.strerror}); "
            "set MEMBOUND_HOME to a folder of your own"
        ) from None


def _usable(cases: Sequence[KernelCase], reasons: Counter[str]) -> dict[str, list[KernelCase]]:
    """The cases that can be fitted, by device; why the others cannot goes to `reasons`.

    What no such device can have taken is named by its line, since it is most likely written in another unit.
    """
    found: dict[str, list[KernelCase]] = {}
    named = 0
    for batch in batches(cases):
        fit = find_fit(published_fits(), batch.hardware, batch.family, batch.kernel, batch.library)
        bound_s, usual_s = batch.bound_s(), batch.predict(fit.parameters)
        good = batch.possible() & batch.usual()
        for case, least_s, near_s, is_good in zip(batch.cases, bound_s, usual_s, good, strict=True):
            wrong = _impossible(case, float(least_s), float(near_s))
            if wrong is not None:
                reasons[wrong if named < MOST_NAMED else "latency_us out of all proportion too"] += 1
                named += 1
            elif is_good:
                found.setdefault(case.hardware.name, []).append(case)
            else:
                reasons["faster than the device's roofs allow, or the best of a search over shapes"] += 1
    return found


def _impossible(case: KernelCase, least_s: float, usual_s: float) -> str | None:
    """What is wrong with a time that is out of all proportion to the device, or None."""
    at = f"{case.row.at('latency_us')} is '{case.row.text('latency_us')}'"
    if case.measured_s * MOST_TOO_FAST < least_s:
        return f"{at}, faster than the device's roofs allow, which need {least_s * 1e6:.3g} us; give microseconds"
    if case.measured_s > MOST_TOO_SLOW * usual_s:
        return f"{at}, where such a device takes about {usual_s * 1e6:.3g} us; give microseconds"
    return None


def _keep(
    found: Mapping[str, Sequence[KernelCase]], table: str, digest: str, sheet: Path | None, left_out: dict[str, int]
) -> ForeignCalibration:
    """Fits each device's rows together with those of earlier tables, and writes the fits of all and the data sheet of
    one, or nothing; what lay there before is kept aside."""
    made, contents, aside, notes = [], {}, {}, []
    for device, cases in found.items():
        kept, target = kept_path(device), device_fits_path(device)
        aside[target], earlier = "previous", None
        if kept.exists():
            try:
                known = DeviceFits.load(kept)
                earlier = known if known.device == device else None
            except DamagedError:
                aside[target] = "damaged"
        fits, said = _fit_with_earlier(cases, table, digest, earlier, sheet)
        made.append(fits)
        notes += said
        contents[target] = fits.model_dump_json(indent=1).encode()
    paths = tuple(contents)
    if sheet is not None:
        hardware, content = read_hardware(sheet), read_bytes(sheet, "hardware file")
        installed = kept_as(hardware) or user_hardware_folder() / f"{file_stem(hardware.name)}.yaml"
        if not installed.exists() or installed.read_bytes() != content:
            contents[installed], aside[installed] = content, "previous"
    moved = write_files(contents, aside)
    damaged = [
        f"'{path}' was damaged and is replaced; it is kept as '{moved[path].name}'"
        for path in paths
        if path in moved and aside[path] == "damaged"
    ]
    return ForeignCalibration(tuple(made), paths, left_out, (*damaged, *notes))


def _fit_with_earlier(
    cases: Sequence[KernelCase], table: str, digest: str, earlier: DeviceFits | None, sheet: Path | None
) -> tuple[DeviceFits, list[str]]:
    """The device's fits from all rows that are known of it, and what is to be said of them.

    A table of the same name is taken for a newer version of the earlier one, and rows that say the same to the letter
    for one measurement, which counts once. Raises MemboundError where an earlier version kept a better fit without its
    rows, which this table would replace.
    """
    hardware, notes = cases[0].hardware, []
    gpu = hardware.name if sheet is None else str(sheet)
    sources: list[SourceTable] = []
    named: list[tuple[str, KernelCase]] = []
    fresh = {(case.family, case.kernel) for case in cases}
    again = {frozenset(KeptRow.of(case).columns.items()) for case in cases}
    for known in earlier.tables if earlier else ():
        if not known.kept:
            continue
        pairs = [(row, case_of(row.row(gpu))) for row in known.kept]
        left = [
            (row, case)
            for row, case in pairs
            if (known.name != table or (case.family, case.kernel) not in fresh)
            and frozenset(row.columns.items()) not in again
        ]
        if len(left) < len(pairs) and (known.name, known.sha256) != (table, digest):
            gone = len(pairs) - len(left)
            notes.append(
                f"{gone} rows of an earlier '{known.name}' of {hardware.name} make room for the {len(cases)} of this"
            )
        if left:
            rows = tuple(row for row, _ in left)
            sources.append(known.model_copy(update={"rows": len(rows), "kept": rows}))
            named += [(known.name, case) for _, case in left]
    read, kept = datetime.now(UTC).replace(microsecond=0), tuple(KeptRow.of(case) for case in cases)
    sources.append(SourceTable(name=table, sha256=digest, rows=len(cases), read=read, kept=kept))
    named += [(table, case) for case in cases]
    fits = fit_device(hardware, named, tuple(sources))
    if earlier is not None:
        lost = earlier.without_rows()
        _refuse_to_replace(earlier, fits, lost)
        fits = fits.with_fits_of(earlier, lost)
    for residual in fits.residuals:
        if residual.rows < FEW_ROWS and table in residual.table.split(", "):
            few = f"{residual.rows} row{'s' if residual.rows > 1 else ''}"
            error = math.expm1(residual.spread)
            notes.append(
                f"{residual.family} {residual.kernel} of {hardware.name} rests on {few} only: interval ±{error:.0%}"
            )
    return fits, notes


def _refuse_to_replace(earlier: DeviceFits, fits: DeviceFits, lost: set[tuple[str, str]]) -> None:
    rows = {(known.family, known.kernel): known for known in earlier.residuals}
    for known in fits.residuals:
        better = rows.get((known.family, known.kernel))
        if better is not None and (known.family, known.kernel) in lost and better.rows > known.rows:
            raise MemboundError(
                f"{known.family} {known.kernel} of '{fits.device}' has {known.rows} rows here, but {better.rows} in "
                f"'{better.table}', which an earlier version fitted without keeping them; put both into one table, or "
                f"move '{kept_path(fits.device)}' away"
            )


def _rows_of(table: Table, device: str, sheet: Path | None) -> tuple[Row, ...]:
    """The rows of one device; those of a data sheet's device name the sheet, so that they are read with it."""
    try:
        hardware = read_hardware(sheet) if sheet else get_hardware(device)
    except MemboundError as error:
        raise MemboundError(f"{error}{'' if sheet else _DESCRIBE}") from None
    if hardware.name == "local":
        raise MemboundError("device 'local' is measured, not fitted from a table; run `membound calibrate`")
    spellings = {normalised(name) for name in (hardware.name, *hardware.aliases)}
    names = {row.text("gpu") for row in table.rows}
    chosen = {name for name in names if normalised(name) in spellings or (not sheet and _is(name, hardware))}
    rows = tuple(row for row in table.rows if row.text("gpu") in chosen)
    if not rows:
        held = ", ".join(sorted(names)[:8])
        raise MemboundError(f"table '{table.path}' has no rows of '{hardware.name}'; its column gpu holds {held}")
    return tuple(replace(row, columns=row.columns | {"gpu": str(sheet)}) for row in rows) if sheet else rows


def _is(name: str, hardware: HardwareSpec) -> bool:
    try:
        return get_hardware(name).name == hardware.name
    except MemboundError:
        return False


def _cases(rows: Sequence[Row]) -> tuple[list[KernelCase], Counter[str]]:
    """The kernels of rows, and how many rows have none for which reason."""
    cases: list[KernelCase] = []
    reasons: Counter[str] = Counter()
    for row in rows:
        try:
            if row.text("gpu") == "local":
                raise MemboundError("device 'local' is measured, not fitted from a table; run `membound calibrate`")
            cases.append(case_of(row))
        except MemboundError as error:
            reasons[str(error).removeprefix(f"line {row.line}: ")] += 1
    return cases, reasons


def fit_device(
    hardware: HardwareSpec, named: Sequence[tuple[str, KernelCase]], tables: tuple[SourceTable, ...]
) -> DeviceFits:
    """The kernels of one device from its cases, each with its table's name: each kernel around the nearest that is
    published, and each engine's around those."""
    fits: list[KernelFit] = []
    residuals: list[Residual] = []
    by_kernel: dict[tuple[Family, str], dict[str, list[KernelCase]]] = {}
    for table, case in named:
        by_kernel.setdefault((case.family, case.kernel), {}).setdefault(table, []).append(case)
    for family, kernel in sorted(by_kernel, key=lambda key: (FAMILIES.index(key[0]), key[1])):
        of_tables = by_kernel[family, kernel]
        chosen = batches([case for cases in of_tables.values() for case in cases])
        made = list(_kernel_fits(hardware, family, kernel, chosen, tuple(of_tables)))
        fits += made
        own = {fit.library: fit for fit in made}
        known = {library: find_fit(published_fits(), hardware, family, kernel, library) for library in own}
        before, after = _errors(chosen, known), _errors(chosen, own)
        residuals.append(
            Residual(
                family=family,
                kernel=kernel,
                rows=len(after),
                median_error_before=_median(before),
                median_error_after=_median(after),
                spread=_spread(after),
                table=", ".join(of_tables),
            )
        )
    return DeviceFits(device=hardware.name, tables=tables, fits=tuple(fits), residuals=tuple(residuals))


def _kernel_fits(
    hardware: HardwareSpec, family: Family, kernel: str, chosen: Sequence[KernelBatch], tables: tuple[str, ...]
) -> Iterator[KernelFit]:
    published = find_fit(published_fits(), hardware, family, kernel)
    overall = _fit(hardware, family, kernel, ANY, chosen, published.parameters, tables)
    yield overall
    for library in sorted({batch.library for batch in chosen} - {ANY}):
        near = find_fit(published_fits(), hardware, family, kernel, library)
        prior = near if (near.kernel, near.library) == (kernel, library) else overall
        of_library = [batch for batch in chosen if batch.library == library]
        yield _fit(hardware, family, kernel, library, of_library, prior.parameters, tables)


def _fit(
    hardware: HardwareSpec,
    family: Family,
    kernel: str,
    library: str,
    chosen: Sequence[KernelBatch],
    prior: Mapping[str, float],
    tables: tuple[str, ...],
) -> KernelFit:
    p = fit_parameters(family, chosen, prior_parameters(family) | dict(prior))
    off = errors(chosen, p)
    sources = sorted({case.row.text("source") for batch in chosen for case in batch.cases} - {""})
    return KernelFit(
        family,
        kernel,
        hardware.name,
        library,
        {name: float(f"{value:.4g}") for name, value in p.items()},
        len(off),
        _median(off),
        _spread(off),
        (*tables, *sources),
    )


def _errors(chosen: Sequence[KernelBatch], by_library: Mapping[str, KernelFit]) -> np.ndarray:
    """ln(predicted / measured) of every row, each engine's with its own fit."""
    return np.concatenate([errors([batch], by_library[batch.library].parameters) for batch in chosen])


def _median(off: np.ndarray) -> float:
    """The median relative error of ln(predicted / measured)."""
    return float(np.median(np.abs(np.expm1(off))))


def _spread(off: np.ndarray) -> float:
    """The 80 % quantile, but never less than what two teams' timings of the same kernel differ by, nor than what so few
    rows can tell: of a single one nobody knows how far the next will be off."""
    return max(float(np.quantile(np.abs(off), 0.8)), ROW_SCATTER, ONE_ROW_SPREAD / math.sqrt(len(off)))
