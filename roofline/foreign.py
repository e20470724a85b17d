"""What did a table of measurements show of a device that is not here, and how is that kept and found again?

Its kernels are fitted around what is published of the device or of its nearest relatives, so that a few rows move the
parameters that they show and leave the others. The fits of a device lie in one file of the user's home and come before
the published ones wherever that device is predicted.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from membound.roofline.efficiency import ANY, FAMILIES, Family, KernelFit, find_fit, published_fits
from membound.roofline.errors import MemboundError
from membound.roofline.files import expanded, locked, read_bytes, write_files
from membound.roofline.fitting import PARAMETERS, ROW_SCATTER, errors, fit_parameters, prior_parameters
from membound.roofline.hardware import (
    HardwareSpec,
    get_hardware,
    kept_as,
    normalised,
    read_hardware,
    user_hardware_folder,
)
from membound.roofline.home import calibration_lock_path, device_fits_path, file_stem
from membound.roofline.scenario import one_sentence
from membound.roofline.validation.kernel_cases import KernelBatch, KernelCase, batches, case_of
from membound.roofline.validation.tables import OPERATOR_COLUMNS, Row, Table, read_table

Fits = Mapping[tuple[str, str, str, str], KernelFit]

# What a table's device is called that nobody described.
_DESCRIBE = "; a device that is not known is described by a YAML file, and given by --device mine.yaml"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SourceTable(_Part):
    """The table that fits come from; `rows` are those of the device that were fitted."""

    name: str
    sha256: str
    rows: int = Field(ge=1)
    read: datetime


class Residual(_Part):
    """How far a kernel's rows were off: by what is published, and by the fit; `spread` is the fit's 80 % quantile."""

    family: str
    kernel: str
    rows: int = Field(ge=1)
    median_error_before: float
    median_error_after: float
    spread: float
    table: str


class DeviceFits(_Part):
    """What tables of measurements showed of one device."""

    schema_version: Literal[1] = 1
    device: str
    tables: tuple[SourceTable, ...]
    fits: tuple[KernelFit, ...]
    residuals: tuple[Residual, ...]

    @property
    def kernels(self) -> set[tuple[str, str]]:
        return {(fit.family, fit.kernel) for fit in self.fits}

    def with_earlier(self, earlier: DeviceFits) -> DeviceFits:
        """These fits, and of an earlier file those of the kernels that the new table does not have."""
        fits = [fit for fit in earlier.fits if (fit.family, fit.kernel) not in self.kernels]
        residuals = [known for known in earlier.residuals if (known.family, known.kernel) not in self.kernels]
        named = {known.table for known in residuals}
        tables = [table for table in earlier.tables if table.name in named and table not in self.tables]
        return self.model_copy(
            update={
                "tables": (*tables, *self.tables),
                "fits": (*fits, *self.fits),
                "residuals": (*residuals, *self.residuals),
            }
        )

    @model_validator(mode="after")
    def _possible(self) -> DeviceFits:
        for fit in self.fits:
            where = f"fit {fit.family} {fit.kernel} {fit.library}"
            if fit.scope != self.device:
                raise ValueError(f"{where}: scope is '{fit.scope}', not the device '{self.device}'")
            limits = PARAMETERS[fit.family]
            if fit.parameters.keys() != limits.keys():
                raise ValueError(f"{where} has the parameters {', '.join(fit.parameters)}, not {', '.join(limits)}")
            for name, value in fit.parameters.items():
                low, high = limits[name].low, limits[name].high
                if not 0.999 * low <= value <= 1.001 * high:
                    raise ValueError(f"{where}: {name} is {value:g}, not between {low:g} and {high:g}")
            if fit.rows < 1 or not (fit.median_error >= 0 and 0 <= fit.spread <= 50):
                raise ValueError(f"{where}: rows, median_error or spread is not possible")
        return self

    @classmethod
    def load(cls, path: Path) -> DeviceFits:
        """Reads saved fits; raises MemboundError where they cannot be read, DamagedError where they are damaged."""
        content = read_bytes(path, "calibration")
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            raise DamagedError(
                f"calibration '{path}' is damaged or from another version ({one_sentence(error)}); "
                "run `membound calibrate --from TABLE.csv` again, which keeps it as `.damaged`"
            ) from None


class DamagedError(MemboundError):
    """A file of fits holds something else."""


def fits_for(hardware: HardwareSpec) -> Fits:
    """The fits to predict a device with: its own from a table where the user gave one, then the published ones."""
    path = _kept_path(hardware.name)
    try:
        state = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return published_fits()
    except OSError as error:
        raise MemboundError(f"calibration '{path}' cannot be read: {error.strerror}") from None
    return _merged(path, state.st_mtime_ns, state.st_size)


def _kept_path(device: str) -> Path:
    """Where a device's fits lie; earlier versions wrote `_` for what a file's name cannot hold everywhere."""
    path = device_fits_path(device)
    earlier = path.with_name(f"{re.sub(r'[^A-Za-z0-9.+-]', '_', device)}.json")
    if path == earlier or path.exists() or not earlier.exists():
        return path
    try:
        return earlier if DeviceFits.load(earlier).device == device else path
    except DamagedError:
        return path


@lru_cache(maxsize=64)
def _merged(path: Path, modified_ns: int, size: int) -> Fits:
    """Published fits and those of a file in one state.

    Where a kernel was measured here, nothing published of the same kernel on the same device counts: an engine's
    would otherwise come before what was measured without naming one.
    """
    own = DeviceFits.load(path)
    replaced = {(family, kernel, own.device) for family, kernel in own.kernels}
    kept = {key: fit for key, fit in published_fits().items() if key[:3] not in replaced}
    return kept | {(fit.family, fit.kernel, fit.scope, fit.library): fit for fit in own.fits}


# --- from a table to fits ---


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
    usable = [batch.only(batch.possible() & batch.usual()) for batch in batches(cases)]
    beyond = len(cases) - sum(len(batch.cases) for batch in usable)
    if beyond:
        reasons["faster than the device's roofs allow, or the best of a search over shapes"] = beyond
    left_out = dict(reasons.most_common())
    by_device: dict[str, list[KernelBatch]] = {}
    for batch in usable:
        if batch.cases:
            by_device.setdefault(batch.hardware.name, []).append(batch)
    if not by_device:
        reason = next(iter(left_out))
        unknown = _DESCRIBE if reason.startswith("hardware") and "is unknown" in reason else ""
        raise MemboundError(f"table '{path}' has no row that can be fitted: {reason}{unknown}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    found = [fit_device(members[0].hardware, members, path.name, digest) for members in by_device.values()]
    try:
        with locked(calibration_lock_path()):
            return _keep(found, sheet, left_out)
    except OSError as error:
        raise MemboundError(
            f"calibration '{device_fits_path(found[0].device).parent}' cannot be written ({error.strerror}); "
            "set MEMBOUND_HOME to a folder of your own"
        ) from None


def _keep(found: Sequence[DeviceFits], sheet: Path | None, left_out: dict[str, int]) -> ForeignCalibration:
    """Writes the fits of all devices and the data sheet of one, or nothing; what lay there before is kept aside."""
    made, contents, aside = [], {}, {}
    for fits in found:
        earlier, target = _kept_path(fits.device), device_fits_path(fits.device)
        aside[target] = "previous"
        if earlier.exists():
            try:
                known = DeviceFits.load(earlier)
                fits = fits.with_earlier(known) if known.device == fits.device else fits
            except DamagedError:
                aside[target] = "damaged"
        made.append(fits)
        contents[target] = fits.model_dump_json(indent=1).encode()
    paths = tuple(contents)
    if sheet is not None:
        hardware, content = read_hardware(sheet), read_bytes(sheet, "hardware file")
        kept = kept_as(hardware) or user_hardware_folder() / f"{file_stem(hardware.name)}.yaml"
        if not kept.exists() or kept.read_bytes() != content:
            contents[kept], aside[kept] = content, "previous"
    moved = write_files(contents, aside)
    notes = tuple(
        f"'{path}' was damaged and is replaced; it is kept as '{moved[path].name}'"
        for path in paths
        if path in moved and aside[path] == "damaged"
    )
    return ForeignCalibration(tuple(made), paths, left_out, notes)


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


def fit_device(hardware: HardwareSpec, members: Sequence[KernelBatch], table: str, digest: str) -> DeviceFits:
    """The kernels of one device, each around the nearest that is published, and each engine's around those."""
    fits: list[KernelFit] = []
    residuals: list[Residual] = []
    for family in FAMILIES:
        for kernel in sorted({batch.kernel for batch in members if batch.family == family}):
            chosen = [batch for batch in members if (batch.family, batch.kernel) == (family, kernel)]
            made = list(_kernel_fits(hardware, family, kernel, chosen, table))
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
                    table=table,
                )
            )
    rows = sum(residual.rows for residual in residuals)
    source = SourceTable(name=table, sha256=digest, rows=rows, read=datetime.now(UTC).replace(microsecond=0))
    return DeviceFits(device=hardware.name, tables=(source,), fits=tuple(fits), residuals=tuple(residuals))


def _kernel_fits(
    hardware: HardwareSpec, family: Family, kernel: str, chosen: Sequence[KernelBatch], table: str
) -> Iterator[KernelFit]:
    published = find_fit(published_fits(), hardware, family, kernel)
    overall = _fit(hardware, family, kernel, ANY, chosen, published.parameters, table)
    yield overall
    for library in sorted({batch.library for batch in chosen} - {ANY}):
        near = find_fit(published_fits(), hardware, family, kernel, library)
        prior = near if (near.kernel, near.library) == (kernel, library) else overall
        of_library = [batch for batch in chosen if batch.library == library]
        yield _fit(hardware, family, kernel, library, of_library, prior.parameters, table)


def _fit(
    hardware: HardwareSpec,
    family: Family,
    kernel: str,
    library: str,
    chosen: Sequence[KernelBatch],
    prior: Mapping[str, float],
    table: str,
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
        (table, *sources),
    )


def _errors(chosen: Sequence[KernelBatch], by_library: Mapping[str, KernelFit]) -> np.ndarray:
    """ln(predicted / measured) of every row, each engine's with its own fit."""
    return np.concatenate([errors([batch], by_library[batch.library].parameters) for batch in chosen])


def _median(off: np.ndarray) -> float:
    """The median relative error of ln(predicted / measured)."""
    return float(np.median(np.abs(np.expm1(off))))


def _spread(off: np.ndarray) -> float:
    """The 80 % quantile, but never less than what two teams' timings of the same kernel differ by."""
    return max(float(np.quantile(np.abs(off), 0.8)), ROW_SCATTER)
