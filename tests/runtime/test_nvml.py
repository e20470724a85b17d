"""A GPU's state is read from NVML in SI units, and what it does not tell is left out; nothing is ever set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from membound.runtime import nvml
from membound.runtime.nvml import GpuState, Nvml

NOT_SUPPORTED = 3  # nvmlReturn_t: NVML_ERROR_NOT_SUPPORTED


class Library:
    """NVML as its reference describes it: numbers are written behind the last argument, 0 is success."""

    def __init__(self, missing: tuple[str, ...] = ()) -> None:
        self.missing = missing
        self.asked: list[bytes] = []

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> int:
        self.asked.append(uuid.value)
        handle._obj.value = 7
        return 0 if uuid.value == b"GPU-1" else NOT_SUPPORTED

    def nvmlDeviceGetPowerUsage(self, device: Any, milliwatts: Any) -> int:
        assert device.value == 7
        return self._write("power", milliwatts, 312_500)

    def nvmlDeviceGetPowerManagementLimit(self, device: Any, milliwatts: Any) -> int:
        return self._write("limit", milliwatts, 700_000)

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any, millijoules: Any) -> int:
        return self._write("energy", millijoules, 2**40)

    def nvmlDeviceGetClockInfo(self, device: Any, clock: Any, megahertz: Any) -> int:
        return self._write("clock", megahertz, {1: 1755, 2: 3201}[clock.value])

    def nvmlDeviceGetMaxClockInfo(self, device: Any, clock: Any, megahertz: Any) -> int:
        return self._write("clock", megahertz, {1: 1980}[clock.value])

    def _write(self, what: str, where: Any, value: int) -> int:
        if what in self.missing:
            return NOT_SUPPORTED
        where._obj.value = value
        return 0


def test_a_reading_is_in_watts_joules_and_megahertz() -> None:
    state = Nvml(Library(), "GPU-1").read()
    assert state == GpuState(312.5, 700.0, 2**40 / 1000, 1755, 1980, 3201, None)  # this library has no temperature
    assert state.describe() == "SM 1755 of 1980 MHz, memory 3201 MHz, 312 of 700 W"


def test_what_a_gpu_does_not_tell_is_left_out() -> None:
    state = Nvml(Library(missing=("power", "limit", "energy", "clock")), "GPU-1").read()
    assert set(state.to_json().values()) == {None}
    assert state.describe() == "the driver tells nothing"


def test_a_gpu_that_nvml_does_not_know_is_named() -> None:
    with pytest.raises(OSError, match="NVML does not know the GPU GPU-2"):
        Nvml(Library(), "GPU-2")


def test_a_cpu_has_no_readings() -> None:
    assert Nvml.of("cpu") is None


def test_no_function_that_sets_anything_is_called() -> None:
    assert "Set" not in Path(nvml.__file__).read_text("utf-8")
