"""How is an experiment run from a terminal, and where does it leave its table and its figure?"""

from __future__ import annotations

import csv
import html
import io
import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from membound.app.commands.terminal import JsonOption, measuring, print_result, progress
from membound.roofline.errors import MemboundError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from membound.app.experiments.finding import Finding


class Name(StrEnum):
    """The experiments, as the command takes them."""

    X1 = "x1"
    X2 = "x2"
    X3 = "x3"
    X4 = "x4"
    X5 = "x5"


def experiment(
    name: Annotated[
        Name,
        typer.Argument(
            help="x1 quantization and acceptance, x2 tasks and temperature, x3 KV sparsity under reuse, x4 honest "
            "baselines, x5 where gains multiply"
        ),
    ],
    quick: Annotated[bool, typer.Option("--quick", help="a smaller grid, once: to see how it works")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="write NAME.json, NAME.csv and NAME.html there")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run an experiment: its table, what it says, and its figure. It is kept, and the dashboard shows it."""
    from membound.app.commands.calibration import ensure_calibrated
    from membound.app.experiments import MEASURED_BY, PREDICTED, run
    from membound.app.experiments.finding import Ask
    from membound.app.tasks import machine_of
    from membound.roofline.scenario import load_scenario

    if out is not None and out.exists() and not out.is_dir():
        raise MemboundError(f"option --out is '{out}', which is a file; give a folder")
    if name.value not in PREDICTED:
        ensure_calibrated(load_scenario(MEASURED_BY))
    with progress() if name.value in PREDICTED else measuring(f"experiment {name.value}") as listener:
        hardware, runtime = machine_of(name.value)
        finding = run(name.value, Ask(listener, hardware, runtime, quick))
    # Printed first: a full disk must not cost the measurement.
    print_result(finding.to_json(), as_json, lambda _: table(finding))
    keep(finding, quick)
    if out is not None:
        write(finding, out)


def keep(finding: Finding, quick: bool) -> str:
    """Keeps the finding as the answer to what the page Experiments asks, and returns its run's id."""
    from membound.app.answering import digest_of
    from membound.app.home import membound_home
    from membound.app.store import Store

    return Store(membound_home()).save_run(
        kind="experiment",
        label=finding.name,
        digest=digest_of("experiment", {"name": finding.name, "quick": quick}),
        scenario_yaml="",
        summary={},
        comparison=finding.to_json(),
    )


def write(finding: Finding, folder: Path) -> None:
    """The finding as JSON, its rows as CSV, and a page that opens without a server."""
    from membound.roofline.reading.files import write_files

    write_files(
        {
            folder / f"{finding.name}.json": json.dumps(finding.to_json(), indent=1).encode(),
            folder / f"{finding.name}.csv": rows_csv(finding).encode(),
            folder / f"{finding.name}.html": page(finding).encode(),
        }
    )


def rows_csv(finding: Finding) -> str:
    """The rows as CSV; what is a list or a mapping is JSON."""
    written = io.StringIO()
    columns = list(dict.fromkeys(column for row in finding.rows for column in row))
    writer = csv.DictWriter(written, columns, lineterminator="\n")
    writer.writeheader()
    for row in finding.rows:
        writer.writerow(
            {key: json.dumps(value) if isinstance(value, list | dict) else value for key, value in row.items()}
        )
    return written.getvalue()


def page(finding: Finding) -> str:
    """One HTML page with the figure, what it says, its rows, and under which conditions."""
    from membound.app.figures.experiments import experiment_figure
    from membound.app.run_files import html_page

    figure = experiment_figure(finding).to_html(full_html=False, include_plotlyjs=True, config={"displaylogo": False})
    says, conditions = ([f"<p>{html.escape(line)}</p>" for line in part] for part in (finding.says, finding.conditions))
    return html_page(
        f"{finding.name.upper()}: {finding.question}", [*says, figure, _rows(finding), *conditions], language="en"
    )


def _rows(finding: Finding) -> str:
    head, *rows = csv.reader(io.StringIO(rows_csv(finding)))
    lines = (f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    titles = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    return f"<div class='wide'><table><tr>{titles}</tr>{''.join(lines)}</table></div>"


def table(finding: Finding) -> RenderableType:
    """The question, the rows, what they say, and the conditions."""
    from rich.console import Group
    from rich.table import Table

    grid = Table(title=finding.question, title_justify="left", box=None, pad_edge=False)
    columns = [key for key in finding.rows[0] if not isinstance(finding.rows[0][key], list | dict)]
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in finding.rows:
        grid.add_row(*(_shown(row.get(column)) for column in columns))
    return Group(grid, "", *finding.says, *finding.conditions)


def _shown(value: Any) -> str:
    if value is None:
        return "unknown"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
