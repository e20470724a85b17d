"""How are fits from tables kept in the user's home, and found again when their device is predicted?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec
from membound.roofline.home import device_fits_path
from membound.roofline.reading.files import read_bytes
from membound.roofline.reading.problems import one_sentence
from membound.roofline.times.fitting import PARAMETERS
from membound.roofline.times.kernel_fits import KernelFit, published_fits
from membound.roofline.validation.kernel_cases import KernelCase
from membound.roofline.validation.tables import Row

Fits = Mapping[tuple[str, str, str, str], KernelFit]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class KeptRow(_Part):
    """A row that was fitted, so that a later table is fitted together with it: its line, and what it says."""

    line: int
    columns: dict[str, str]

    @classmethod
    def of(cls, case: KernelCase) -> KeptRow:
        columns = {name: text for name, text in case.row.columns.items() if text.strip() and name != "gpu"}
        return cls(line=case.row.line, columns=columns)

    def row(self, gpu: str) -> Row:
        return Row(self.line, self.columns | {"gpu": gpu}, float(self.columns["latency_us"]))


class SourceTable(_Part):
    """A table that fits come from; `rows` are those of the device that were fitted, and `kept` what they say.

    Earlier versions kept none.
    """

    name: str
    sha256: str
    rows: int = Field(ge=1)
    read: datetime
    kept: tuple[KeptRow, ...] = ()


class Residual(_Part):
    """How far a kernel's rows were off: by what is published, and by the fit; `spread` is the fit's interval.

    `table` names the tables whose rows they are.
    """

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

    def without_rows(self) -> set[tuple[str, str]]:
        """Kernels that an earlier version fitted from rows that it did not keep."""
        kept = {known.name for known in self.tables if known.kept}
        return {(known.family, known.kernel) for known in self.residuals if not kept & set(known.table.split(", "))}

    def with_fits_of(self, earlier: DeviceFits, kernels: set[tuple[str, str]]) -> DeviceFits:
        """These fits, and those of an earlier file of `kernels` that no row here is of."""
        left = kernels - self.kernels
        residuals = [known for known in earlier.residuals if (known.family, known.kernel) in left]
        named = {known.table for known in residuals}
        return self.model_copy(
            update={
                "tables": (*(table for table in earlier.tables if table.name in named), *self.tables),
                "fits": (*(fit for fit in earlier.fits if (fit.family, fit.kernel) in left), *self.fits),
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
    path = kept_path(hardware.name)
    try:
        state = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return published_fits()
    except OSError as error:
        raise MemboundError(f"calibration '{path}' cannot be read: {error.strerror}") from None
    return _merged(path, state.st_mtime_ns, state.st_size)


def kept_path(device: str) -> Path:
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
