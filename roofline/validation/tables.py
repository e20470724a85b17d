"""Which tables of measurements does membound read, and is this file one of them?"""

from __future__ import annotations

import csv
import math
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
_SCHEMAS: dict[Schema, tuple[tuple[str, ...], str]] = {
    "operators": (OPERATOR_COLUMNS, "latency_us"),
    "end_to_end": (END_TO_END_COLUMNS, "value"),
}


@dataclass(frozen=True)
class Row:
    """A row of a table: its line in the file, its columns as text, and what was measured."""

    line: int
    columns: dict[str, str]
    measured: float

    def text(self, column: str) -> str:
        return self.columns.get(column, "").strip()

    def number(self, column: str) -> float | None:
        """The column as a number, None where it is empty; raises MemboundError naming line, column and value."""
        text = self.text(column)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0:
            raise MemboundError(f"line {self.line}: {column} is '{text}'; it must be a number of 0 or more")
        return value

    def count(self, column: str) -> float:
        """The column as a number above 0; raises MemboundError where it is missing."""
        value = self.number(column)
        if not value:
            raise MemboundError(f"line {self.line}: {column} is '{self.text(column)}'; it must be a number above 0")
        return value


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
    except (UnicodeDecodeError, csv.Error) as error:
        raise MemboundError(f"table '{path}' is not CSV in UTF-8: {error}") from None
    if not rows:
        raise MemboundError(f"table '{path}' has a header and no rows; give at least one measurement")
    return Table(path, schema, header, rows)


def _schema_of(header: tuple[str, ...], path: Path) -> Schema:
    missing: dict[Schema, list[str]] = {
        schema: [column for column in columns if column not in header] for schema, (columns, _) in _SCHEMAS.items()
    }
    for schema, absent in missing.items():
        if not absent:
            return schema
    nearest = min(missing, key=lambda schema: len(missing[schema]))
    raise MemboundError(
        f"table '{path}' lacks the columns {', '.join(missing[nearest][:6])} of the {nearest.replace('_', '-')} schema"
    )


def _row(line: int, record: dict[str, str | None], schema: Schema, path: Path) -> Row:
    measured = _SCHEMAS[schema][1]
    columns = {name: value or "" for name, value in record.items() if isinstance(name, str)}
    try:
        value = float(columns[measured])
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise MemboundError(
            f"table '{path}', line {line}: {measured} is '{columns[measured]}'; it must be a number above 0"
        )
    return Row(line, columns, value)
