"""Which tables of measurements does membound read, and is this file one of them?"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from membound.roofline.errors import MemboundError

Schema = Literal["operators", "end_to_end"]

OPERATOR_COLUMNS = (
    *("source", "gpu", "op", "model", "tp", "m", "n", "k", "batch", "q_len", "kv_len"),
    *("n_heads", "n_kv_heads", "head_dim", "dtype", "latency_us", "notes"),
)
END_TO_END_COLUMNS = (
    *("source", "engine", "engine_version", "gpu", "n_gpu", "tp", "pp", "model", "weight_dtype", "act_dtype"),
    *("kv_dtype", "technique", "batch_or_concurrency", "input_len", "output_len", "metric", "value", "baseline"),
    *("notes", "trust", "flags"),
)
# Without these no row says anything; of a run the rest may be left out, as it may be empty.
_RUN_NEEDS = ("gpu", "model", "metric", "value")
_SCHEMAS: dict[Schema, tuple[tuple[str, ...], str]] = {
    "operators": (OPERATOR_COLUMNS, "latency_us"),
    "end_to_end": (END_TO_END_COLUMNS, "value"),
}

# A number as a whole: `1,024`, `4k`, `~8`, `1_000` and `nan` are none.
_PLAIN = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
# What no amount passes: products of several stay numbers, and so do their inverses.
_LARGEST, ABOVE_0 = 1e30, 1e-30
# Devices that a degree of parallelism may count, at most.
MOST_DEVICES = 4096.0


def number(text: str, field: str, *, least: float = 0.0, most: float = _LARGEST, whole: bool = False) -> float:
    """The number that all of `text` is; raises MemboundError with field, value and what would be right.

    Nothing is read out of the middle of a text. A `least` of `ABOVE_0` takes every number above 0.
    """
    value = float(text) if _PLAIN.fullmatch(text) else math.nan
    if least <= value <= most and (value == 0 or value >= ABOVE_0) and not (whole and value % 1.0):
        return value
    kind = "a whole number" if whole else "a number"
    if most < _LARGEST or value > most:
        limits = f"from {least:g} to {most:.15g}"
    else:
        limits = "above 0" if least == ABOVE_0 else f"of {least:g} or more"
    raise MemboundError(f"{field} is '{text}'; it must be {kind} {limits}")


@dataclass(frozen=True)
class Row:
    """A row of a table: its line in the file, its columns as text, and what was measured."""

    line: int
    columns: dict[str, str]
    measured: float

    def text(self, column: str) -> str:
        return self.columns.get(column, "").strip()

    def at(self, name: str) -> str:
        """How a message names a field of this row."""
        return f"line {self.line}: {name}"

    def number(self, column: str) -> float | None:
        """The column as a number, None where it is empty; raises MemboundError naming line, column and value."""
        text = self.text(column)
        return number(text, self.at(column)) if text else None

    def count(self, column: str) -> float:
        """The column as a number above 0; raises MemboundError where it is missing."""
        return number(self.text(column), self.at(column), least=ABOVE_0)

    def size(self, column: str, most: float = _LARGEST) -> float:
        """The column as a whole number above 0; raises MemboundError where it is missing."""
        return number(self.text(column), self.at(column), least=1.0, most=most, whole=True)

    def degree(self, column: str) -> int | None:
        """The column as a number of devices, None where it is empty."""
        return int(self.size(column, MOST_DEVICES)) if self.text(column) else None


@dataclass(frozen=True)
class Table:
    """A file of measurements in one of the two schemas."""

    path: Path
    schema: Schema
    header: tuple[str, ...]
    rows: tuple[Row, ...]


def read_table(path: Path) -> Table:
    """Reads a CSV of operators or of end-to-end measurements, told apart by its columns.

    Raises MemboundError with one sentence for a file that cannot be read, a header of neither schema, and a measured
    value that is not a number above 0.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header = tuple(reader.fieldnames or ())
            schema = _schema_of(header, path)
            rows = tuple(_row(reader.line_num, record, schema, path) for record in reader)
    except OSError as error:
        raise MemboundError(f"table '{path}' cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise MemboundError(f"table '{path}' is not CSV in UTF-8: it is no text") from None
    except csv.Error as error:
        raise MemboundError(f"table '{path}' is not CSV in UTF-8: {error}") from None
    if not rows:
        raise MemboundError(f"table '{path}' has a header and no rows; give at least one measurement")
    return Table(path, schema, header, rows)


def _schema_of(header: tuple[str, ...], path: Path) -> Schema:
    def named(schema: Schema) -> int:
        return len(set(header).intersection(_SCHEMAS[schema][0]))

    meant = max(_SCHEMAS, key=named)
    needed = _RUN_NEEDS if meant == "end_to_end" else OPERATOR_COLUMNS
    missing = [column for column in needed if column not in header]
    if not missing:
        return meant
    rest = "the others may be left out" if meant == "end_to_end" else "those of which nothing is known may be empty"
    raise MemboundError(
        f"table '{path}' lacks the columns {', '.join(missing)} of the {meant.replace('_', '-')} schema; {rest}"
    )


def _row(line: int, record: dict[str, str | None], schema: Schema, path: Path) -> Row:
    measured = _SCHEMAS[schema][1]
    columns = {name: value or "" for name, value in record.items() if isinstance(name, str)}
    value = number(columns[measured].strip(), f"table '{path}', line {line}: {measured}", least=ABOVE_0)
    return Row(line, columns, value)
