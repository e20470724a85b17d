"""How far are predictions from what was measured: this machine's runs, a table of rows, and what is published?

Each row of a frame is a prediction beside its measurement, with columns COLUMNS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import pandas as pd
from pydantic import ValidationError

from membound.app.records import Run
from membound.roofline.results.comparison import Comparison

COLUMNS = (
    *("metric", "device", "model", "phase", "batch", "measured", "spread", "predicted", "low", "high"),
    *("what", "source"),
)
GROUPED = ("device", "model", "phase", "batch", "source")
SHIPPED = "live-cpu-2core-vm"
WORST = 10


@dataclass(frozen=True)
class Figures:
    """A table of the published validation: its heading, its cells as they are printed, and the rows that are missed.

    The page prints in bold what is missed.
    """

    title: str
    table: pd.DataFrame
    missed: tuple[str, ...] = ()


def errors_by(rows: pd.DataFrame, column: str | None = None) -> pd.DataFrame:
    """Errors of all rows, or of the rows of each value of a column, the most rows first.

    `median` and `p90` are of |predicted / measured - 1|, `bias` is the median with its sign, `within` the share whose
    measurement lies in the predicted interval.
    """
    groups = [("", rows)] if column is None else rows.groupby(rows[column].astype(str), sort=False)
    found = [
        {
            "group": name,
            "rows": len(group),
            "median": float(np.median(np.abs(error))),
            "p90": float(np.quantile(np.abs(error), 0.9)),
            "bias": float(np.median(error)),
            "within": float(is_within(group).mean()),
        }
        for name, group in groups
        if len(error := error_of(group))
    ]
    found.sort(key=lambda group: -int(group["rows"]))  # type: ignore[call-overload]
    return pd.DataFrame(found, columns=["group", "rows", "median", "p90", "bias", "within"])


def error_of(rows: pd.DataFrame) -> pd.Series:
    """predicted / measured - 1 of each row."""
    return rows["predicted"] / rows["measured"] - 1.0


def is_within(rows: pd.DataFrame) -> pd.Series:
    """Whether each measurement lies in its predicted interval."""
    return (rows["low"] <= rows["measured"]) & (rows["measured"] <= rows["high"])


def worst(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that are furthest off, in ratio, the worst first."""
    off = np.abs(np.log((rows["predicted"] / rows["measured"]).to_numpy()))
    return rows.iloc[np.argsort(-off, kind="stable")[:WORST]]


# --- where rows come from ---


def of_table(run: Run) -> pd.DataFrame:
    """The judged rows of a table that a job has validated."""
    rows = run.table("rows").to_pandas()
    rows = rows[rows["judged"]].assign(spread=np.nan)
    rows["batch"] = rows["batch"].map(lambda batch: "" if pd.isna(batch) else f"{batch:g}")
    return rows[list(COLUMNS)]


def of_runs(runs: Iterable[Run]) -> tuple[pd.DataFrame, int]:
    """What this machine has measured: the rows of its comparisons, the newest first.

    With it the number of runs whose comparison another version wrote in a way that this one does not read.
    """
    rows: list[dict[str, Any]] = []
    unread = 0
    for run in runs:
        if not run.measured_here():
            continue
        try:
            rows += _rows(run.comparison() or {}, "local", _model_of(run), f"{run.label} {run.id}")
        except ValidationError:
            unread += 1
    return _frame(rows), unread


def shipped() -> pd.DataFrame:
    """The comparison of a machine that membound was checked on, as it ships."""
    text = (resources.files("membound.data") / "measurements" / f"{SHIPPED}.json").read_text("utf-8")
    document = json.loads(text)
    return _frame(_rows(document, document["machine"], "SmolLM2-135M", SHIPPED))


def _model_of(run: Run) -> str:
    found = re.search(r"^model: (\S+)", run.scenario_yaml(), re.MULTILINE)
    return found.group(1) if found else ""


def _frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _rows(document: Mapping[str, Any], device: str, model: str, source: str) -> list[dict[str, Any]]:
    rows = [Comparison.model_validate(row) for row in document.get("comparisons", ())]
    return [
        {
            "metric": row.metric if row.technique == "baseline" else "gain",
            "device": device,
            "model": model,
            "phase": row.technique,
            "batch": str(row.point.get("workload.arrivals.concurrency", "")),
            "measured": row.measured,
            "spread": row.spread,
            "predicted": row.predicted,
            "low": row.low,
            "high": row.high,
            "what": row.baseline if row.technique == "baseline" else f"{row.technique} / {row.baseline}",
            "source": source,
        }
        for row in rows
        if row.measured
    ]


def published() -> list[Figures]:
    """The tables of roofline/VALIDATION.md, which says how they were made."""
    text = (resources.files("membound.roofline") / "VALIDATION.md").read_text("utf-8")
    found = []
    for part in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        listed = re.findall(r"(?:^\|.*\n)+", body, flags=re.MULTILINE)
        found += [_figures(title.strip(), lines) for lines in listed]
    return found


def _figures(title: str, lines: str) -> Figures:
    header, _, *rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines.splitlines()]
    plain = [[cell.replace("**", "").replace("`", "") for cell in row] for row in rows]
    missed = tuple(row[0] for row in rows if any("**" in cell for cell in row))
    return Figures(title, pd.DataFrame(plain, columns=header), missed)


def promises(figures: Figures) -> pd.DataFrame:
    """What is promised and reached, as shares, of the rows whose two are errors in percent."""
    found = []
    for _, row in figures.table.iterrows():
        promised, reached = (re.match(r"(\d+(?:\.\d+)?) ?%", str(row[name])) for name in ("promised", "reached"))
        if promised and reached and "refused" not in row["what"]:
            shares = [float(match.group(1)) / 100 for match in (promised, reached)]
            found.append({"what": row["what"], "promised": shares[0], "reached": shares[1]})
    return pd.DataFrame(found, columns=["what", "promised", "reached"])


def counts(figures: Figures) -> tuple[str, str]:
    """How many kernels and how many runs the promises were held against, as they are printed."""
    row = figures.table[figures.table["what"] == "rows refused"].iloc[0]
    kernels, _, runs = str(row["rows"]).partition(" and ")
    return kernels, runs
