"""What are the power, energy and clocks of an NVIDIA GPU? Read from the driver's library, never set.

The functions and constants are those of NVIDIA's NVML API reference (`nvml.h`), which come with every driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_uint, c_ulonglong, c_void_p
from dataclasses import asdict, dataclass
from typing import Any

import torch

_SM_CLOCK, _MEMORY_CLOCK = 1, 2  # nvmlClockType_t: NVML_CLOCK_SM, NVML_CLOCK_MEM
_ON_DIE = 0  # nvmlTemperatureSensors_t: NVML_TEMPERATURE_GPU


@dataclass(frozen=True)
class GpuState:
    """One reading; what this GPU or driver does not tell is None."""

    power_w: float | None
    power_limit_w: float | None
    energy_j: float | None  # since the driver was loaded
    sm_mhz: int | None
    largest_sm_mhz: int | None
    memory_mhz: int | None
    temperature_c: int | None

    def describe(self) -> str:
        """Such as "SM 1980 of 1980 MHz, memory 3201 MHz, 312 of 700 W, 54 degrees C"."""
        parts = [
            _of("SM", self.sm_mhz, self.largest_sm_mhz, "MHz"),
            _of("memory", self.memory_mhz, None, "MHz"),
            _of("", self.power_w, self.power_limit_w, "W"),
            _of("", self.temperature_c, None, "degrees C"),
        ]
        return ", ".join(part for part in parts if part) or "the driver tells nothing"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Nvml:
    """Readings of one GPU."""

    def __init__(self, library: Any, uuid: str) -> None:
        """`library` is NVML itself. Raises OSError where it does not know the GPU."""
        self._library = library
        self._device = c_void_p()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(c_char_p(uuid.encode()), byref(self._device)):
            raise OSError(f"NVML does not know the GPU {uuid}")

    @classmethod
    def of(cls, device: torch.device | str) -> Nvml | None:
        """The GPU behind a torch device; None where there is none, or no NVML that knows it."""
        if torch.device(device).type != "cuda" or not torch.cuda.is_available():
            return None
        try:
            return cls(
                ctypes.CDLL("libnvidia-ml.so.1"),
                f"GPU-{torch.cuda.get_device_properties(device).uuid}",
            )
        except (OSError, AttributeError):  # a build of torch for other GPUs names none
            return None

    def read(self) -> GpuState:
        power_mw = self._number("nvmlDeviceGetPowerUsage")
        limit_mw = self._number("nvmlDeviceGetPowerManagementLimit")
        energy_mj = self._number("nvmlDeviceGetTotalEnergyConsumption", kind=c_ulonglong)
        return GpuState(
            power_w=None if power_mw is None else power_mw / 1000,
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
            energy_j=None if energy_mj is None else energy_mj / 1000,
            sm_mhz=self._number("nvmlDeviceGetClockInfo", _SM_CLOCK),
            largest_sm_mhz=self._number("nvmlDeviceGetMaxClockInfo", _SM_CLOCK),
            memory_mhz=self._number("nvmlDeviceGetClockInfo", _MEMORY_CLOCK),
            temperature_c=self._number("nvmlDeviceGetTemperature", _ON_DIE),
        )

    def _number(self, function: str, *arguments: int, kind: type[Any] = c_uint) -> int | None:
        """What a function writes behind its last argument; None where it returns an error or is missing."""
        value = kind()
        try:
            failed = getattr(self._library, function)(self._device, *map(c_uint, arguments), byref(value))
        except AttributeError:
            return None
        return None if failed else int(value.value)


class EnergyMeter:
    """What the GPUs of a run take from `begin` on, and how they are clocked; without GPUs it knows nothing."""

    def __init__(self, gpus: Sequence[Nvml]) -> None:
        self._gpus = gpus
        self._before: list[GpuState] = []

    @classmethod
    def of(cls, device: str, count: int) -> EnergyMeter:
        """Of `device`, or where a model is divided among several GPUs of the first `count`, if NVML knows them all."""
        names = [device] if count == 1 or not device.startswith("cuda") else [f"cuda:{rank}" for rank in range(count)]
        gpus = [gpu for name in names if (gpu := Nvml.of(name)) is not None]
        return cls(gpus if len(gpus) == len(names) else [])

    def begin(self) -> None:
        self._before = [gpu.read() for gpu in self._gpus]

    def notes(self, output_tokens: int) -> list[str]:
        """Each GPU's state at the end, and the energy that all have taken for each output token."""
        after = [gpu.read() for gpu in self._gpus]
        named = [f"GPU {i}" for i in range(len(after))] if len(after) > 1 else ["GPU"]
        notes = [f"{name} at the end: {state.describe()}" for name, state in zip(named, after, strict=False)]
        taken = [
            end.energy_j - begin.energy_j
            for begin, end in zip(self._before, after, strict=True)
            if begin.energy_j is not None and end.energy_j is not None
        ]
        if taken and len(taken) == len(after) and output_tokens:
            counters = "the GPU's counter" if len(taken) == 1 else f"the counters of {len(taken)} GPUs"
            joules = sum(taken)
            notes.append(f"{joules:.0f} J by {counters}, {joules / output_tokens:.3g} J for each output token")
        return notes


def _of(name: str, value: float | None, most: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{name} {value:.0f}{'' if most is None else f' of {most:.0f}'} {unit}".strip()
