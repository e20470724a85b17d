"""All commands of `membound`, and what their mistakes come to.

Every sub-command that gives a result takes `--json` and then prints exactly one JSON document to standard output;
progress and words go to standard error. Bad input is one sentence and exit code 2; a question that has no answer ends
with that code too, after its result says why.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from membound.app.commands import kernels, planning
from membound.app.commands.calibration import calibrate
from membound.app.commands.experiment import experiment
from membound.app.commands.imports import import_results
from membound.app.commands.outputs import check_output, check_suffix
from membound.app.commands.runs import compare, measure, simulate
from membound.app.commands.terminal import (
    HardwareOption,
    JsonOption,
    ScenarioArgument,
    SetOption,
    print_result,
    progress,
    scenario_of,
)
from membound.app.commands.training import train_draft
from membound.app.commands.usage import UsageError, misused
from membound.roofline.errors import MemboundError

if TYPE_CHECKING:
    pass

app = typer.Typer(
    name="membound",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        typer.echo(f"membound {importlib.metadata.version('membound')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Which LLM serving technique helps at my operating point, by how much, and is that true on my machine?"""


def dashboard(
    host: Annotated[str, typer.Option(help="address to serve on")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="port; the next free one is taken if it is in use, any free one for 0"),
    ] = 8501,
    browser: Annotated[bool, typer.Option(help="open a browser")] = True,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="a further name of this server, such as its proxy's")
    ] = None,
    allow_files: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="a folder whose models and prompts a scenario on a page may name"),
    ] = None,
) -> None:
    """Serve the dashboard."""
    from membound.app.server import serve

    for name in allow_host or ():
        if not name or set(name) & set("*:/ "):
            raise MemboundError(f"option --allow-host is '{name}'; give one name without scheme, port and wildcard")
    serve(
        host=host,
        port=port,
        open_browser=browser,
        allowed_hosts=allow_host or (),
        allowed_folders=allow_files or (),
    )


def predict(
    scenario: ScenarioArgument,
    batch: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, help="sequences in the step; by default the load's"),
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="tokens of each sequence, the new ones included; by default the load's")
    ] = None,
    phase: Annotated[str, typer.Option(help="decode, prefill, or verify with drafts")] = "decode",
    hardware: HardwareOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Roofline of one operating point: its time down to operators, each bound, memory, and where the times are from.

    Exit code 2 where it does not fit in memory, after what would hold it and the step as if it did.
    """
    from membound.app.reports import operating_point as report
    from membound.roofline.operating_point import OperatingPoint
    from membound.simulator.scheduling.build import static_said
    from membound.simulator.steady import usual_step

    chosen = scenario_of(scenario, set_, hardware)
    notes = []
    if batch is None or context is None:
        usual = usual_step(chosen, phase)
        batch, context = batch or usual.batch, context or usual.context
        notes.append(f"batch {batch} at context {context} is by {usual.whose}; --batch and --context ask about others")
        notes += static_said(chosen) if phase == "decode" else ()
    point = OperatingPoint.of(chosen, batch=batch, context=context, phase=phase)
    document = {"scenario": chosen.model_dump(mode="json"), **point.to_json(), "notes": notes}
    if (drafts := chosen.setup.drafts) is not None and phase != "verify":
        document["notes"] += [
            f"a step without drafts: what speculation by {drafts.kind} gains is a matter of many steps, which "
            "`membound stack` and `membound simulate` look at; --phase verify is the step that checks the drafts"
        ]
    print_result(document, as_json, report.operating_point, answered=document["memory"]["fits"])


def validate(
    table: Annotated[Path, typer.Argument(metavar="FILE.csv", help="measured operators, or end-to-end measurements")],
    rows: Annotated[
        Path | None, typer.Option(metavar="OUT.csv", help="write every row with its prediction to this file")
    ] = None,
    leave_out: Annotated[
        Literal["device", "source"] | None,
        typer.Option(help="also fit the operators without each of these in turn, and predict it (minutes)"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predictions against a table of published measurements: the error by group, and the worst rows.

    Rows that cannot be predicted are counted with their reasons; exit code 2 where none can.
    """
    from membound.app.reports import validation as report
    from membound.app.validation import document
    from membound.roofline.validation import generalisation
    from membound.roofline.validation.report import validate_table

    check_suffix("option --rows", rows, ".csv")
    parts = generalisation.parts_of(table, leave_out) if leave_out is not None else None
    found = validate_table(table)
    if rows is not None:
        found.write_rows(rows)
    unseen = None
    if parts is not None and leave_out is not None:
        typer.echo(f"fitting without each {leave_out} in turn", err=True)
        unseen = generalisation.leave_out(parts, leave_out)
    print_result(document(found, unseen), as_json, report.validation, answered=found.predicted > 0)


def record(
    prompts: Annotated[Path, typer.Argument(help="a YAML file with a list 'prompts' of id, task and text")],
    scenario: Annotated[str, typer.Option(help="whose model writes the continuations")] = "live-cpu",
    output: Annotated[Path | None, typer.Option(help="JSON lines; beside the prompts if not given")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="tokens to record for each prompt")] = 128,
) -> None:
    """Record what a model writes after each prompt: the content that simulations replay."""
    from membound.app.machine import need_torch

    written = output or prompts.with_suffix(".jsonl")
    check_output("option --output", written, [prompts, scenario])
    need_torch()
    from membound.runtime.engine import Runtime
    from membound.runtime.record import record as run_record

    chosen = scenario_of(scenario).with_techniques(())
    with progress() as listener:
        count = run_record(prompts, written, Runtime(), chosen, tokens, listener.progress)
    typer.echo(f"recorded {count} prompts", err=True)


def scenarios(as_json: JsonOption = False) -> None:
    """List the shipped scenarios."""
    from membound.app.reports import scenarios as report
    from membound.roofline.scenario import load_scenario, shipped_scenarios

    listed = [{"name": name, "description": load_scenario(name).description} for name in shipped_scenarios()]
    print_result({"scenarios": listed}, as_json, report.scenarios)


def doctor(as_json: JsonOption = False) -> None:
    """Print what an issue report needs: versions, devices, kernels, store."""
    from membound.app.commands import doctor as checks

    typer.echo("looking at this machine; the first time kernels are compiled, which takes up to a minute", err=True)
    found = checks.report()
    print_result(found, as_json, checks.render)


for command in (dashboard, predict, simulate, measure, compare, validate, record, scenarios, doctor):
    app.command()(command)
planning.add_commands(app)
app.command()(calibrate)
app.command("import")(import_results)
app.command("train-draft")(train_draft)
app.command()(experiment)
app.add_typer(kernels.app)


def run() -> int:
    """Carries out what the command line asks; returns the exit code.

    Known errors are one sentence on standard error and exit code 2; Ctrl-C is KeyboardInterrupt.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # not every terminal has every character
    with contextlib.suppress(ValueError):  # not in the main thread, where tests call this
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends in order
    try:
        code = app(prog_name="membound", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except UsageError as error:
        typer.echo(misused(error), err=True)
        return 2
    except MemboundError as error:
        typer.echo(f"membound: {error}", err=True)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        tried = f"'{str(error.filename)[:200]}' cannot be used" if error.filename else "cannot write the result"
        typer.echo(f"membound: {tried}: {error.strerror or error}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    if code == 130:  # typer's own answer to Ctrl-C
        raise KeyboardInterrupt
    return code or 0
