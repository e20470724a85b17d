"""What is a device: its roofs, memory and links from the data sheet, and its calibration where it was measured?"""

from __future__ import annotations

import datetime
import difflib
import logging
import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from membound.roofline.calibration import Calibration
from membound.roofline.errors import MemboundError
from membound.roofline.files import expanded, read_text, state_of
from membound.roofline.home import home_folder, local_calibration_path
from membound.roofline.part import Part
from membound.roofline.plain_yaml import parse_yaml
from membound.roofline.problems import kind_of, one_sentence

# What a matrix unit can multiply. Microscaled formats count under the number they hold: mxfp4 and nvfp4 are fp4.
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp6", "fp4", "int4")
Architecture = Literal[
    "Volta",
    "Turing",
    "Ampere",
    "Ada",
    "Hopper",
    "Blackwell",
    "CDNA1",
    "CDNA2",
    "CDNA3",
    "CDNA4",
    "RDNA3",
    "RDNA4",
    "Xe-HPC",
    "Xe2",
    "Gaudi",
    "TPU",
    "NeuronCore",
    "Apple",
    "CPU",
    "unknown",
]

# 2:4 sparsity skips half of the multiplications; a larger ratio means that a sparse figure stands where a dense one
# belongs, or the other way round. The rest is the rounding of data sheets.
MOST_SPARSE_TO_DENSE = 2.05


def _within(low: float, high: float, unit: str) -> AfterValidator:
    """Refuses what no device has: such a figure is in another unit, or a slip of the hand."""

    def checked(value: float) -> float:
        if not low <= value <= high:
            raise ValueError(f"give {unit} between {low:g} and {high:g}")
        return value

    return AfterValidator(checked)


def _has_letters(name: str) -> str:
    if not normalised(name):
        raise ValueError("a name needs a letter or a digit")
    return name


# Wide enough for a microcontroller and for a rack that is sold as one device.
Bandwidth = Annotated[float, _within(1e8, 1e15, "bytes/s")]
Rate = Annotated[float, _within(1e9, 1e18, "FLOP/s")]
Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_has_letters)]


class Link(Part):
    """What connects a device with others or with its host.

    `bandwidth_bytes_per_s` is what one device sends in one direction over all its lanes together; data sheets often
    quote both directions. `max_devices` is how many devices reach each other over it.
    """

    kind: str = Field(min_length=1, description="NVLink 4, xGMI, PCIe 4.0 x16, InfiniBand NDR and so on")
    bandwidth_bytes_per_s: Annotated[float, _within(1e6, 1e15, "bytes/s")]
    latency_s: Annotated[float, _within(0, 1e-2, "seconds")]
    max_devices: int = Field(ge=2, le=1_000_000)
    topology: Literal["switched", "mesh", "ring", "torus", "pair", "host"]


class Price(Part):
    """What a device-hour cost on demand, from a published list of a day."""

    usd_per_h: Annotated[float, _within(1e-4, 1e5, "US dollars an hour")]
    date: datetime.date
    source: str = Field(min_length=1)


class HardwareSpec(Part):
    """One device. Rates are in SI units and dense; `matrix_flops` is by the numbers that the matrix unit multiplies.

    `sparse_flops` are the rates with 2:4 structured sparsity. `runs_as` names, for a number format that the matrix
    unit lacks, the one that engines use there instead at the same size. `sources` says where each figure is from and
    `verified` which of them were read there; the others are a lead. `calibration` is what was measured on it; without
    one its times are the data sheet's with typical efficiencies.
    """

    name: Name
    aliases: tuple[Name, ...] = ()
    variant_of: str | None = Field(None, description="the device with the same chip, whose kernels it runs")
    vendor: str
    kind: Literal["cpu", "gpu", "accelerator"]
    architecture: Architecture = "unknown"
    year: int | None = Field(None, ge=1990, le=2100)

    memory_bytes: Annotated[int, _within(1e6, 1e15, "bytes")]
    memory_kind: Literal["HBM", "GDDR", "LPDDR", "DDR", "unknown"] = "unknown"
    bandwidth_bytes_per_s: Bandwidth
    cache_bytes: Annotated[int, _within(1e3, 1e13, "bytes")] | None = Field(
        None, description="the last-level cache that all compute units share"
    )
    cache_bandwidth_bytes_per_s: Annotated[float, _within(1e8, 1e17, "bytes/s")] | None = None

    compute_units: Annotated[int, _within(1, 1e6, "compute units")] | None = Field(
        None, description="SMs, CUs, cores: what a kernel's blocks are dealt to"
    )
    clock_hz: Annotated[float, _within(1e6, 1e11, "hertz")] | None = Field(None, description="boost clock")
    matrix_flops: dict[str, Rate]
    sparse_flops: dict[str, Rate] = Field(default_factory=dict)
    vector_flops: Rate | None = Field(None, description="fp32 outside the matrix unit")
    runs_as: dict[str, str] = Field(default_factory=dict)
    launch_s: Annotated[float, _within(0, 1e-2, "seconds")] = Field(
        3e-6, description="time of an operator that does nothing, launches captured"
    )

    scale_up: Link | None = Field(None, description="between the devices of a node or rack")
    scale_out: Link | None = Field(None, description="between nodes, per device, as usually deployed")
    host: Link | None = Field(None, description="to the memory of the host")

    power_w: Annotated[float, _within(0.1, 1e6, "watts")] | None = None
    price: Price | None = None
    source: str = Field(min_length=1)
    sources: dict[str, str] = Field(default_factory=dict)
    verified: tuple[str, ...] = ()
    notes: str = ""
    calibration: Calibration | None = None

    @field_validator("memory_bytes", mode="before")
    @classmethod
    def _whole_in_any_notation(cls, value: Any) -> Any:
        """48e9 is a number of bytes too, which YAML reads as text."""
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            return value
        return int(number) if number.is_integer() and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _rates_are_possible(self) -> HardwareSpec:
        for table in ("matrix_flops", "sparse_flops"):
            for dtype in getattr(self, table):
                if dtype not in DTYPES:
                    raise ValueError(f"{table} names the dtype '{dtype}'; known are {', '.join(DTYPES)}")
        for dtype, rate in self.sparse_flops.items():
            dense = self.matrix_flops.get(dtype)
            if dense is None:
                raise ValueError(f"sparse_flops.{dtype} has no dense rate beside it; give matrix_flops.{dtype} too")
            if not dense <= rate <= MOST_SPARSE_TO_DENSE * dense:
                raise ValueError(
                    f"sparse_flops.{dtype} is {rate:g}, {rate / dense:.2f} times the dense {dense:g}; "
                    "2:4 sparsity gives between 1 and 2 times, so one of the two is the other kind of figure"
                )
        for dtype, instead in self.runs_as.items():
            if dtype in self.matrix_flops or instead not in self.matrix_flops:
                raise ValueError(
                    f"runs_as.{dtype} is {instead}; it must lead from a dtype without a matrix rate to one with"
                )
        return self

    @property
    def price_usd_per_h(self) -> float | None:
        """The on-demand price of a device-hour, where one is known."""
        return self.price.usd_per_h if self.price else None

    @property
    def generation(self) -> str:
        """What devices share that behave alike: an architecture with HBM differs from the same with GDDR."""
        return f"{self.architecture} {self.memory_kind}"

    def to_yaml(self) -> str:
        """The device as YAML that `read_hardware` reads back to an equal one."""
        document = self.model_dump(mode="json", exclude_defaults=True)
        return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)

    def computes_in(self, dtype: str) -> str | None:
        """The dtype that the device really multiplies for operands of `dtype`; None where it cannot."""
        instead = self.runs_as.get(dtype, dtype)
        return instead if instead in self._rates(sparse=False) else None

    def peak_flops(self, precision: str, *, sparse: bool = False) -> float:
        """The dense rate in FLOP/s for operands of `precision`, or its 2:4 rate where `sparse`.

        Raises MemboundError where the device has none: a rate is never made up.
        """
        rates = self._rates(sparse=sparse)
        dtype = self.runs_as.get(precision, precision)
        if dtype in rates:
            return rates[dtype]
        kind = "2:4 sparse matrix" if sparse else "matrix"
        known = f"it has {', '.join(rates)}" if rates else "it has none"
        raise MemboundError(f"hardware '{self.name}' has no {precision} {kind} rate; {known}")

    def _rates(self, *, sparse: bool) -> dict[str, float]:
        """The matrix rates; a device that multiplies fp32 only on its vector units has their rate for it."""
        if sparse:
            return self.sparse_flops
        vector = {} if self.vector_flops is None else {"fp32": self.vector_flops}
        return {**vector, **self.matrix_flops}


def parse_hardware(document: Any, origin: str) -> HardwareSpec:
    """A device from plain data; raises MemboundError with one sentence."""
    if not isinstance(document, dict):
        raise MemboundError(f"{origin} is {kind_of(document)}, not a mapping of hardware fields")
    try:
        return HardwareSpec.model_validate(document)
    except ValidationError as error:
        raise MemboundError(f"{origin}: {one_sentence(error, HardwareSpec)}") from None


def read_hardware(path: Path) -> HardwareSpec:
    """The device that a YAML file describes; raises MemboundError with one sentence."""
    spec = _read(path)
    if spec.variant_of is None:
        return spec
    wanted = normalised(spec.variant_of)
    related = {known.name for _, known in _user_files() if wanted in _spellings(known)}
    related |= {known.name for known in _shipped_as(wanted)}
    if len(related) != 1:
        problem = "is unknown" if not related else f"may be {' or '.join(sorted(related))}"
        raise MemboundError(
            f"hardware file '{path}': field 'variant_of' is '{spec.variant_of}', which {problem}; "
            "name a device of the catalog or of your own, or leave the field out"
        )
    return spec.model_copy(update={"variant_of": related.pop()})


def _read(path: Path) -> HardwareSpec:
    state = state_of(path, "hardware file")
    return _read_hardware(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=64)
def _read_hardware(path: Path, modified_ns: int, size: int) -> HardwareSpec:
    """The device of a file in one state: it is parsed again when that changes."""
    origin = f"hardware file '{path}'"
    return parse_hardware(parse_yaml(read_text(path, "hardware file"), origin, dates=True), origin)


def hardware_of(calibration: Calibration) -> HardwareSpec:
    """The machine that a calibration describes, as the device `local`; raises MemboundError for an impossible one."""
    document = dict(
        name=LOCAL,
        vendor="this machine",
        kind=calibration.kind,
        architecture="CPU" if calibration.kind == "cpu" else "unknown",
        memory_bytes=calibration.memory_bytes,
        bandwidth_bytes_per_s=calibration.memory_bandwidth,
        matrix_flops={name: calibration.matrix_flops(name) for name in calibration.linear if name in DTYPES},
        source=f"calibrated {calibration.created} on {calibration.machine}, {calibration.threads} threads",
        calibration=calibration,
    )
    return parse_hardware(document, f"the calibration of '{calibration.machine}'")


LOCAL, LOCAL_GPU = "local", "local-gpu"


def is_local(name: str) -> bool:
    """Whether the device of this name is the machine at hand, which alone can be measured."""
    return name in (LOCAL, LOCAL_GPU)


def local_hardware(name: str = LOCAL) -> HardwareSpec:
    """This machine as it was calibrated; raises MemboundError where it was not, and for the GPU of one without."""
    calibration = Calibration.load(local_calibration_path())
    if name == LOCAL_GPU and calibration.kind != "gpu":
        raise MemboundError(
            f"hardware is '{LOCAL_GPU}', but what was calibrated on this machine is its CPU; "
            "run `membound calibrate --device cuda` where there is a GPU, or give hardware: local"
        )
    return hardware_of(calibration)


# --- the catalog ---

_VENDOR_WORDS = re.compile(
    r"\b(nvidia|amd|intel|apple|google|amazon|aws|tesla|geforce|instinct|radeon|gpu|graphics)\b|\(tm\)"
)
_MEMORY_SIZE = re.compile(r"\b(\d+) ?gi?b\b")
_ALIASES = re.compile(r"^aliases: \[(.*)\]$", re.MULTILINE)
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def normalised(name: str) -> str:
    """What two spellings of one device's name have in common: letters and digits, without vendor or brand.

    Letters are those of any script. Names are compared whole: a part of a name is another device (a laptop's RTX 4090
    is not an RTX 4090).
    """
    folded = unicodedata.normalize("NFC", name.casefold()).replace("_", " ")
    return _letters(_VENDOR_WORDS.sub(" ", folded)) or _letters(folded)


def _letters(text: str) -> str:
    """Letters with their marks, digits, and the plus that tells two products apart."""
    return "".join(char for char in text if char.isalnum() or char == "+" or unicodedata.category(char)[0] == "M")


def _shipped_files() -> Iterator[Any]:
    folder = resources.files("membound.data") / "hardware"
    return (entry for entry in folder.iterdir() if entry.name.endswith(".yaml"))


@cache
def _shipped_names() -> dict[str, str]:
    """File stem of each shipped device by its normalised names, read without parsing the files."""
    stems = {}
    for entry in _shipped_files():
        stem = entry.name.removesuffix(".yaml")
        aliases = _ALIASES.search(entry.read_text("utf-8"))
        for name in (stem, *(aliases[1].split(",") if aliases else ())):
            stems[normalised(name)] = stem
    return stems


@cache
def _shipped(stem: str) -> HardwareSpec:
    entry = resources.files("membound.data") / "hardware" / f"{stem}.yaml"
    return parse_hardware(yaml.load(entry.read_text("utf-8"), _Loader), entry.name)


@cache
def catalog() -> dict[str, HardwareSpec]:
    """Every device of `data/hardware/`, by name."""
    stems = sorted(entry.name.removesuffix(".yaml") for entry in _shipped_files())
    return {spec.name: spec for spec in map(_shipped, stems)}


def user_hardware_folder() -> Path:
    """Where a user's own devices lie, one YAML file each."""
    return home_folder() / "hardware"


def user_hardware() -> dict[str, HardwareSpec]:
    """The user's own devices by name, without the files that describe none."""
    return {spec.name: read_hardware(path) for path, spec in _user_files()}


def _user_files() -> list[tuple[Path, HardwareSpec]]:
    """The user's own devices with their files; a file that describes none is left out, with a warning."""
    devices = []
    for path in _user_paths():
        try:
            devices.append((path, _read(path)))
        except MemboundError as error:
            _warn_once(f"{error}; it is left out")
    return devices


def _user_paths() -> list[Path]:
    folder = user_hardware_folder()
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".yaml")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise MemboundError(f"hardware folder '{folder}' cannot be read: {error.strerror}") from None


@cache
def _warn_once(sentence: str) -> None:
    logging.getLogger("membound").warning("membound: %s", sentence)


def get_hardware(name: str) -> HardwareSpec:
    """The device called `name`: `local` or `local-gpu`, the path of a YAML file, the user's, or one of the catalog.

    A memory size in the name must be the device's. Raises MemboundError with the closest names otherwise, and for a
    name that two files have.
    """
    if is_local(name):
        return local_hardware(name)
    if name.endswith((".yaml", ".yml")):
        return read_hardware(expanded(name, "hardware file"))
    if not normalised(name):
        raise MemboundError(
            f"hardware '{name}' has no letter or digit; give a device's name, or the path of a YAML file"
        )
    for path in _user_paths():
        if normalised(path.stem) == normalised(name):
            _read(path)  # who asks for it is told what is wrong with it
    own = _user_files()
    for wanted, gigabytes in _readings(name):
        known: list[tuple[Path | str, HardwareSpec]] = [*own]
        known += [("the catalog", spec) for spec in _shipped_as(wanted)]
        found = [
            (where, spec)
            for where, spec in known
            if wanted in _spellings(spec) and (gigabytes is None or _holds(spec, gigabytes))
        ]
        if len(found) > 1:
            named = " and ".join(f"{spec.name} of {_said(where)}" for where, spec in found)
            raise MemboundError(f"hardware '{name}' is the name of {named}; rename one, or give the path of its file")
        if found:
            where, spec = found[0]
            return read_hardware(where) if isinstance(where, Path) else spec
    raise MemboundError(f"hardware '{name}' is unknown; {_closest(name, (spec for _, spec in own))}")


def kept_as(sheet: HardwareSpec) -> Path | None:
    """The file of the user's device that has the name of a data sheet, which it replaces; None where there is none.

    Raises MemboundError where a name or an alias of the sheet is another device's: neither would be found any more.
    """
    spellings = _spellings(sheet)
    others: list[tuple[Path | str, HardwareSpec]] = [*_user_files()]
    others += [("the catalog", spec) for spelling in spellings for spec in _shipped_as(spelling)]
    same = [where for where, spec in others if isinstance(where, Path) and spec.name == sheet.name]
    for where, spec in others:
        if where not in same[:1] and spellings & _spellings(spec):
            raise MemboundError(
                f"a name of the device '{sheet.name}' is already that of {spec.name} of {_said(where)}; "
                "rename one of them, or its alias"
            )
    return same[0] if same else None


def kept_in(name: str) -> Path:
    """The file of the user's device of this name."""
    return next(path for path, spec in _user_files() if spec.name == name)


def _said(where: Path | str) -> str:
    return f"'{where}'" if isinstance(where, Path) else where


def _spellings(spec: HardwareSpec) -> set[str]:
    return {normalised(name) for name in (spec.name, *spec.aliases)}


def _readings(name: str) -> Iterator[tuple[str, int | None]]:
    """The normalised name, and the same without a memory size in it, which then has to be checked."""
    wanted = normalised(name)
    yield wanted, None
    sizes = _MEMORY_SIZE.findall(name.lower())
    without = normalised(_MEMORY_SIZE.sub(" ", name.lower()))
    if sizes and without:
        yield without, int(sizes[0])


def _holds(spec: HardwareSpec, gigabytes: int) -> bool:
    """Whether a device has the memory that a name claims; what it reports is up to a fourteenth less."""
    return 0.93 * gigabytes <= spec.memory_bytes / 2**30 <= 1.07 * gigabytes


def _shipped_as(wanted: str) -> tuple[HardwareSpec, ...]:
    stem = _shipped_names().get(wanted)
    return (_shipped(stem),) if stem else ()


def _closest(name: str, own: Iterable[HardwareSpec]) -> str:
    """What somebody who wrote `name` may have meant."""
    if name.lower() in ("cpu", "gpu", "cuda", "auto", "host"):
        return f"give {LOCAL} for this machine, {LOCAL_GPU} for its GPU, or a device's name"
    if "/" in name:
        return "give a device's name, or the path of a YAML file, which ends in .yaml"
    spellings = {
        normalised(spelling): spec.name
        for spec in (*catalog().values(), *own)
        for spelling in (spec.name, *spec.aliases)
    }
    close = difflib.get_close_matches(normalised(name), spellings, n=6, cutoff=0.5)
    devices = list(dict.fromkeys(spellings[spelling] for spelling in close))[:3]
    return (
        f"did you mean {' or '.join(devices)}?" if devices else "`membound catalog devices` lists those that are known"
    )
