"""Which device has this name: this machine, a file's, the user's, or one of the catalog?"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from membound.roofline.errors import MemboundError
from membound.roofline.hardware.calibration import Calibration
from membound.roofline.hardware.names import Reading, normalised, readings
from membound.roofline.hardware.spec import DTYPES, HardwareSpec
from membound.roofline.home import home_folder, local_calibration_path
from membound.roofline.reading.files import expanded, is_file, read_text, state_of
from membound.roofline.reading.plain_yaml import parse_yaml
from membound.roofline.reading.problems import kind_of, one_sentence


def parse_hardware(document: Any, origin: str) -> HardwareSpec:
    """A device from plain data; raises MemboundError with one sentence."""
    if not isinstance(document, dict):
        raise MemboundError(f"{origin} is {kind_of(document)}, not a mapping of hardware fields")
    try:
        return HardwareSpec.model_validate(document)
    except ValidationError as error:
        lacks = any(problem["type"] == "missing" for problem in error.errors())
        raise MemboundError(f"{origin}: {one_sentence(error, HardwareSpec)}{_LEAST if lacks else ''}") from None


# What a data sheet has at least, as a person types it, in bytes and operations a second.
_LEAST = (
    "; at least: {name: X1, vendor: NVIDIA, kind: gpu, architecture: Hopper, memory_kind: HBM, memory_bytes: 80e9, "
    "bandwidth_bytes_per_s: 3.35e12, matrix_flops: {bf16: 989e12, fp8: 1979e12}, source: its data sheet}"
)


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
    hardware = _calibrated()
    if name == LOCAL_GPU and hardware.kind != "gpu":
        raise MemboundError(
            f"hardware is '{LOCAL_GPU}', but what was calibrated on this machine is its CPU; "
            "run `membound calibrate --device cuda` where there is a GPU, or give hardware: local"
        )
    return hardware


def _calibrated() -> HardwareSpec:
    path = local_calibration_path()
    try:
        state = path.stat()
    except OSError:
        return hardware_of(Calibration.load(path))  # which says what is wrong
    return _read_calibrated(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4)
def _read_calibrated(path: Path, modified_ns: int, size: int) -> HardwareSpec:
    """The machine of a calibration in one state: it is read again when that changes."""
    return hardware_of(Calibration.load(path))


_ALIASES = re.compile(r"^aliases: \[(.*)\]$", re.MULTILINE)
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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

    A memory size in the name must be the device's; a power below its own makes it a device with that limit. Raises
    MemboundError with the closest names otherwise, and for a name that two files have.
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
    for reading in readings(name):
        wanted = reading.name
        known: list[tuple[Path | str, HardwareSpec]] = [*own]
        known += [("the catalog", spec) for spec in _shipped_as(wanted)]
        found = [(where, spec) for where, spec in known if wanted in _spellings(spec) and _has(spec, reading)]
        if len(found) > 1:
            named = " and ".join(f"{spec.name} of {_said(where)}" for where, spec in found)
            raise MemboundError(f"hardware '{name}' is the name of {named}; rename one, or give the path of its file")
        if found:
            where, spec = found[0]
            return _as_named(read_hardware(where) if isinstance(where, Path) else spec, reading)
    if is_file(Path(name)):
        raise MemboundError(f"hardware '{name}' is a file, but no data sheet; give one that ends in .yaml")
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


def _has(spec: HardwareSpec, reading: Reading) -> bool:
    """Whether a device has the memory that a name claims, no less power, and is a card where it is called one."""
    gigabytes, watts = reading.gigabytes, reading.watts
    if reading.is_card and (spec.scale_up is None or spec.scale_up.topology != "host"):
        return False
    holds = gigabytes is None or _holds(spec, gigabytes) or (_is_sold_in_sizes(spec) and _memory_gib(spec) > gigabytes)
    return holds and (watts is None or (spec.power_w is not None and watts <= spec.power_w))


def _holds(spec: HardwareSpec, gigabytes: int) -> bool:
    """Whether a device has so much memory; what it reports is up to a fourteenth less."""
    return 0.93 * gigabytes <= _memory_gib(spec) <= 1.07 * gigabytes


def _memory_gib(spec: HardwareSpec) -> float:
    return spec.memory_bytes / 2**30


def _is_sold_in_sizes(spec: HardwareSpec) -> bool:
    """Apple sells a chip with several sizes of memory, of which the catalog has the largest."""
    return spec.architecture == "Apple"


def _as_named(spec: HardwareSpec, reading: Reading) -> HardwareSpec:
    """The device with the smaller memory or power that its name says; its kernels are those of the whole one."""
    changes: dict[str, Any] = {}
    name, gigabytes, watts = spec.name, reading.gigabytes, reading.watts
    if gigabytes is not None and not _holds(spec, gigabytes):
        name, changes["memory_bytes"] = f"{name}-{gigabytes}GB", gigabytes * 2**30
    if watts is not None and watts != spec.power_w:
        name, changes["power_w"] = f"{name}-{watts}W", float(watts)
    if not changes:
        return spec
    changes |= {"name": name, "aliases": (), "variant_of": spec.variant_of or spec.name, "price": None}
    return spec.model_copy(update=changes)


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
