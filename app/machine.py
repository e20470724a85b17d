"""Can this machine measure, and with what? Its calibration, and the runtime that measures as calibrated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from membound.app.home import membound_home
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec, is_local, local_hardware
from membound.roofline.home import local_calibration_path
from membound.roofline.progress import Progress, silent

if TYPE_CHECKING:
    from membound.roofline.hardware.calibration import Calibration
    from membound.roofline.scenario import Scenario
    from membound.runtime.engine import Runtime


def need_torch() -> None:
    """Raises MemboundError with what to do where torch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError:
        raise MemboundError("torch is not installed, and measuring needs it; run `make setup TORCH=cpu`") from None


def calibrate_machine(
    device: str = "cpu", threads: int | None = None, *, quick: bool = False, progress: Progress = silent
) -> Calibration:
    """Measures this machine's roofs and keeps them; the old calibration stays where that fails.

    A `quick` calibration measures no more than what a first look needs. Raises MemboundError where torch is missing,
    or finds no GPU that is asked for, and where it could not be kept, before minutes are spent on it.
    """
    membound_home()
    need_torch()
    import torch

    from membound.runtime.calibration.calibrate import QUICK, calibrate

    if device == "cuda" and not torch.cuda.is_available():
        raise MemboundError(f"torch {torch.__version__} finds no GPU on this machine; measure the roofs of its CPU")
    found = calibrate(device=device, threads=threads, progress=progress, plan=QUICK if quick else None)
    found.save(local_calibration_path())
    return found


def machine_for(scenario: Scenario) -> tuple[HardwareSpec, Runtime]:
    """This machine and a runtime on it, with the threads that it was calibrated with.

    Raises MemboundError where the scenario is for another machine, this one is not calibrated, or torch is missing.
    """
    if not is_local(scenario.hardware):
        raise MemboundError(
            f"field 'hardware' is '{scenario.hardware}', but only 'local' and 'local-gpu' can be measured here; "
            "use `membound simulate` for other devices"
        )
    need_torch()
    from membound.runtime.engine import Runtime

    hardware = local_hardware(scenario.hardware)
    calibration = hardware.calibration
    device = "cuda" if calibration and calibration.kind == "gpu" else "cpu"
    return hardware, Runtime(device, threads=calibration.threads if calibration else None)
