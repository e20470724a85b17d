"""A GPU's state is read from NVML in SI units, and what it does not tell is left out; nothing is ever set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from membound.roofline.hardware import get_hardware
from membound.roofline.scenario import load_scenario
from membound.runtime import nvml
from membound.runtime.engine import Runtime
from membound.runtime.nvml import EnergyMeter, GpuState, Nvml

NOT_SUPPORTED = 3  # nvmlReturn_t: NVML_ERROR_NOT_SUPPORTED


class Library:
    """NVML as its reference describes it: numbers are written behind the last argument, 0 is success."""

    def __init__(self, missing: tuple[str, ...] = ()) -> None:
        self.missing = missing
        self.asked: list[bytes] = []
        self.millijoules = 2**40

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
        return self._write("energy", millijoules, self.millijoules)

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


def test_the_energy_of_a_token_is_that_of_all_gpus_since_the_run_began() -> None:
    libraries = [Library(), Library()]
    meter = EnergyMeter([Nvml(library, "GPU-1") for library in libraries])
    libraries[0].millijoules += 77_000  # while the model was loaded
    meter.begin()
    libraries[0].millijoules += 30_000
    libraries[1].millijoules += 12_000
    *states, energy = meter.notes(output_tokens=84)
    assert energy == "42 J by the counters of 2 GPUs, 0.5 J for each output token"
    assert [state.split(":")[0] for state in states] == ["GPU 0 at the end", "GPU 1 at the end"]


def test_the_energy_of_gpus_of_which_one_tells_nothing_is_not_said() -> None:
    meter = EnergyMeter([Nvml(Library(), "GPU-1"), Nvml(Library(missing=("energy",)), "GPU-1")])
    meter.begin()
    assert not [note for note in meter.notes(10) if " J " in note]


def test_a_run_divides_its_energy_by_the_tokens_that_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(EnergyMeter, "of", lambda device, count: EnergyMeter([Nvml(library, "GPU-1")]))

    def observer(*_: object) -> None:
        library.millijoules += 1000

    scenario = load_scenario("live-cpu").with_value("model", "SmolLM2-135M[:1]").with_value("weights", "random")
    prompts = {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 20}}
    scenario = scenario.with_value("workload.prompts", prompts)
    scenario = scenario.with_value("workload.requests", 6).with_value("workload.arrivals.concurrency", 6)
    scenario = scenario.with_value("engine.max_num_seqs", 2).with_value("engine.admission", {"max_waiting": 2})
    result = Runtime().run(scenario, get_hardware("H100-SXM5"), observer)
    tokens, steps = sum(map(len, result.outputs.values())), int(result.steps["steps"].sum())
    assert 0 < result.summary.completed < 6
    assert f"{steps} J by the GPU's counter, {steps / tokens:.3g} J for each output token" in result.provenance.notes


def test_no_function_that_sets_anything_is_called() -> None:
    assert "Set" not in Path(nvml.__file__).read_text("utf-8")
