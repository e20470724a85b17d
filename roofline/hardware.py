"""What is a device: its roofs from the data sheet and, where somebody measured it, its calibration?"""

from __future__ import annotations

import difflib
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from membound.roofline.calibration import Calibration
from membound.roofline.errors import MemboundError
from membound.roofline.home import local_calibration_path
from membound.roofline.scenario import one_sentence


class HardwareSpec(BaseModel):
    """One device. Rates are dense and in SI units; `matrix_flops` is by the precision that computes.

    `calibration` is what was measured on it; without one its times are the data sheet's with typical efficiencies.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str
    vendor: str
    kind: Literal["cpu", "gpu", "accelerator"]
    memory_bytes: int = Field(gt=0)
    bandwidth_bytes_per_s: float = Field(gt=0)
    matrix_flops: dict[str, float]
    launch_s: float = Field(3e-6, ge=0, description="time of an operator that does nothing, launches captured")
    power_w: float | None = Field(None, gt=0)
    price_usd_per_h: float | None = Field(None, ge=0)
    source: str = Field(min_length=1)
    notes: str = ""
    calibration: Calibration | None = None

    def peak_flops(self, precision: str) -> float:
        """The matrix rate in FLOP/s for operands of `precision`.

        Raises MemboundError where the device has none: a rate is never made up.
        """
        try:
            return self.matrix_flops[precision]
        except KeyError:
            known = ", ".join(self.matrix_flops)
            raise MemboundError(f"hardware '{self.name}' has no {precision} matrix rate; it has {known}") from None


@cache
def catalog() -> dict[str, HardwareSpec]:
    """Every device of `data/hardware/`, by name."""
    folder = resources.files("membound.data") / "hardware"
    devices = {}
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".yaml"):
            spec = parse_hardware(yaml.safe_load(entry.read_text("utf-8")), entry.name)
            devices[spec.name] = spec
    return devices


def parse_hardware(document: Any, origin: str) -> HardwareSpec:
    """A device from plain data; raises MemboundError with one sentence."""
    try:
        return HardwareSpec.model_validate(document)
    except ValidationError as error:
        raise MemboundError(f"{origin}: {one_sentence(error)}") from None


def hardware_of(calibration: Calibration) -> HardwareSpec:
    """The machine that a calibration describes, as the device `local`."""
    return HardwareSpec(
        name="local",
        vendor="this machine",
        kind=calibration.kind,
        memory_bytes=calibration.memory_bytes,
        bandwidth_bytes_per_s=calibration.memory_bandwidth,
        matrix_flops={name: calibration.matrix_flops(name) for name in calibration.linear},
        source=f"calibrated {calibration.created} on {calibration.machine}, {calibration.threads} threads",
        calibration=calibration,
    )


def local_hardware() -> HardwareSpec:
    """This machine as it was calibrated; raises MemboundError where it was not."""
    return hardware_of(Calibration.load(local_calibration_path()))


def get_hardware(name: str) -> HardwareSpec:
    """The catalog's device called `name`, or `local`; raises MemboundError with the closest names otherwise."""
    if name == "local":
        return local_hardware()
    devices = catalog()
    if name in devices:
        return devices[name]
    close = difflib.get_close_matches(name, devices, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known are local, {', '.join(devices)}"
    raise MemboundError(f"hardware '{name}' is unknown; {hint}")
