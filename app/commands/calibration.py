"""How is this machine calibrated from a terminal, and other devices from a table?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from membound.app.busy import load_of_others, usable_cores
from membound.app.commands import kernels
from membound.app.commands.terminal import JsonOption, measuring, print_result
from membound.roofline.errors import MemboundError

if TYPE_CHECKING:
    from membound.roofline.hardware.calibration import Calibration
    from membound.roofline.scenario import Scenario


def calibrate(
    threads: Annotated[
        int | None, typer.Option(min=1, help="threads to calibrate with; all cores if not given")
    ] = None,
    table: Annotated[
        Path | None, typer.Option("--from", metavar="TABLE.csv", help="fit devices from a table of measured operators")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda|NAME|YAML",
            help="what of this machine; with --from this device alone, or one that a YAML file describes",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="only what dense models in bf16 and int8 take, in half a minute")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine's roofs, or fit the kernels of other devices to a table of measurements."""
    from membound.app.reports import calibration as report

    if table is not None:
        if threads is not None:
            raise MemboundError("option --threads is for measuring this machine; leave it out with --from")
        if quick:
            raise MemboundError("option --quick is for measuring this machine; leave it out with --from")
        print_result(_calibrate_from(table, device), as_json, report.foreign_calibration)
        return
    if device not in (None, "cpu", "cuda"):
        raise MemboundError("option --device needs --from TABLE.csv, except for cpu and cuda, which are measured here")
    print_result(_calibrate(threads, device or "cpu", quick).model_dump(mode="json"), as_json, report.calibration)


def ensure_calibrated(scenario: Scenario) -> None:
    """Measures this machine first where a scenario is to be measured on it and nobody has."""
    from membound.app.machine import need_torch
    from membound.roofline.hardware import LOCAL_GPU, is_local
    from membound.roofline.home import local_calibration_path
    from membound.roofline.models.files import resolve_model

    if is_local(scenario.hardware) and not local_calibration_path().exists():
        if scenario.hardware != LOCAL_GPU and scenario.weights == "random":
            need_torch()
            from membound.runtime.loading.loaded import check_room

            check_room(scenario, resolve_model(scenario.model))
        typer.echo(
            "this machine is not calibrated yet: that is done now, and takes two to three minutes where it is quiet",
            err=True,
        )
        _calibrate(None, "cuda" if scenario.hardware == LOCAL_GPU else "cpu")


def _calibrate(threads: int | None, device: str = "cpu", quick: bool = False) -> Calibration:
    from membound.app.home import membound_home
    from membound.app.machine import calibrate_machine, need_torch

    membound_home()  # one that cannot keep it is said before minutes are spent
    cores = usable_cores()
    if threads is not None and threads > cores:
        raise MemboundError(f"option --threads is {threads}, but this machine has {cores} usable cores; give {cores}")
    with measuring("membound calibrate") as listener:
        if (load := load_of_others()) is not None:
            typer.echo(
                f"this machine is busy: load average {load:.1f} on {cores} cores; others hold the measurement up, "
                "which then takes several times as long",
                err=True,
            )
        takes = "half a minute" if quick else "two to three minutes"
        if device == "cuda":
            takes = "a minute or two" if quick else "several minutes, in which kernels are compiled too,"
        listener.progress(0.0, f"loading torch; what follows takes {takes} on a quiet machine")
        need_torch()
        if device == "cuda":
            kernels.need_gpu()
        return calibrate_machine(device, threads, quick=quick, progress=listener.progress)


def _calibrate_from(table: Path, device: str | None) -> dict[str, Any]:
    from membound.roofline.hardware import kept_in
    from membound.roofline.times.foreign import calibrate_from

    found = calibrate_from(table, device)
    for note in found.notes:
        typer.echo(note, err=True)
    if device is not None and device.endswith((".yaml", ".yml")):
        for fits in found.devices:
            typer.echo(
                f"the data sheet is kept in '{kept_in(fits.device)}', so {fits.device} is known by name", err=True
            )
    devices = [
        {
            "device": fits.device,
            "file": str(path),
            "rows": fits.tables[-1].rows,
            **fits.model_dump(mode="json", exclude={"tables": {"__all__": {"kept"}}}),
        }
        for fits, path in zip(found.devices, found.paths, strict=True)
    ]
    return {"devices": devices, "left_out": found.left_out}
