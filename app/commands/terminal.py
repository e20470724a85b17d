"""What do all commands take alike, and how do they show progress and print their result?"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from membound.app.listener import ProgressListener
from membound.roofline.errors import MemboundError

if TYPE_CHECKING:
    from membound.roofline.scenario import Scenario

ScenarioArgument = Annotated[str, typer.Argument(metavar="SCENARIO", help="a YAML file, or a shipped scenario's name")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON document to standard output")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="replace a field, e.g. workload.requests=8")
]
_LEAST_COLUMNS = 80
HardwareOption = Annotated[str | None, typer.Option(help="a device of the catalog, or 'local'")]


def scenario_of(name: str, assignments: list[str] | None = None, hardware: str | None = None) -> Scenario:
    """The scenario of that name or file, with what `--set` and `--hardware` say instead."""
    from membound.roofline.scenario import load_scenario

    values = assigned(assignments)
    if hardware is not None and "hardware" in values:
        raise MemboundError(f"hardware is given twice, by --hardware as '{hardware}' and by --set; give one of them")
    if hardware is not None:
        values["hardware"] = hardware
    chosen = load_scenario(name).with_values(values)
    _tell_namesake(chosen.hardware)
    return chosen


def assigned(assignments: list[str] | None) -> dict[str, object]:
    """The values of fields that `--set` gives."""
    from membound.roofline.reading.plain_yaml import parse_yaml

    values: dict[str, object] = {}
    for assignment in assignments or []:
        key, separator, value = assignment.partition("=")
        if not separator:
            raise MemboundError(f"option --set is '{assignment}'; give KEY=VALUE, such as workload.requests=8")
        values[key] = parse_yaml(value, f"option --set {key}")  # of two the last, as defaults are set before
    return values


def _tell_namesake(hardware: str) -> None:
    """Says that a data sheet by path has the name of a device of the catalog, whose measured kernels it then gets."""
    if not hardware.endswith((".yaml", ".yml")):
        return
    from membound.roofline.hardware import catalog, get_hardware

    sheet = get_hardware(hardware)
    known = catalog().get(sheet.name)
    if known is not None and known != sheet:
        typer.echo(
            f"'{hardware}' is called {sheet.name}, as a device of the catalog is, whose measured kernels are used for "
            "it; give it another name if it is another device",
            err=True,
        )


@contextmanager
def progress(quiet_s: float = 1.0) -> Iterator[ProgressListener]:
    """A bar on standard error while the block runs; where that is no terminal, a line a stage and every ten seconds.

    Nothing is said of what is done within `quiet_s`.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield ProgressListener(_Lines(time.monotonic, quiet_s).show)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), *times)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield ProgressListener(lambda fraction, message: bar.update(task, completed=fraction, description=message))


class _Lines:
    """Progress for a file: a line for each stage, and one every ten seconds."""

    _BETWEEN_S = 10.0

    def __init__(self, clock: Callable[[], float], quiet_s: float) -> None:
        self.clock, self.quiet_s = clock, quiet_s
        self.began_s = self.told_s = clock()
        self.stage = ""

    def show(self, fraction: float, message: str = "") -> None:
        now_s = self.clock()
        stage = "".join(character for character in message if not character.isdigit())
        is_due = now_s - self.told_s >= self._BETWEEN_S or stage != self.stage
        if message and is_due and now_s - self.began_s >= self.quiet_s:
            self.told_s, self.stage = now_s, stage
            typer.echo(f"{fraction:4.0%} {message}", err=True)


@contextmanager
def measuring(holder: str) -> Iterator[ProgressListener]:
    """The bar of a measurement, which waits until no other one runs on this machine."""
    from membound.app.jobs import measurement_slot

    with progress(quiet_s=0.0) as listener:

        def on_wait(ahead: str) -> None:
            listener.progress(
                0.0, f"waiting for {ahead} to finish, as both would disturb each other on this machine; Ctrl-C gives up"
            )

        with measurement_slot(holder, on_wait):
            yield listener


def print_result(document: Any, as_json: bool, render: Any, *, answered: bool = True) -> None:
    """One JSON document on standard output, or what `render` makes of it for people.

    Where that says why there is no answer, the command ends with exit code 2.
    """
    _print(document, as_json, render)
    need_answer(answered)


def need_answer(answered: bool) -> None:
    """Ends the command with exit code 2 where what it printed says why there is no answer."""
    if not answered:
        raise typer.Exit(2)


def _print(document: Any, as_json: bool, render: Any) -> None:
    if as_json:
        if sys.stdout is None:
            raise MemboundError("standard output is closed, so the result cannot be printed")
        unicode = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"
        sys.stdout.write(json.dumps(document, ensure_ascii=not unicode, allow_nan=False) + "\n")
        sys.stdout.flush()
        return
    from rich.console import Console

    console = Console(markup=False, emoji=False)
    if console.width < _LEAST_COLUMNS:  # a narrower terminal breaks lines itself, and no number is cut
        console.width = _LEAST_COLUMNS
    console.print(render(document))
