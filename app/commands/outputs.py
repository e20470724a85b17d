"""May a command write to this file, and as what? Asked before its work begins; and the rows of a table, written."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from membound.roofline.errors import MemboundError


def check_output(option: str, path: Path | None, inputs: Iterable[Any]) -> None:
    """Raises MemboundError where the path is one of the inputs, also by a link, or nothing can be written there.

    Of the inputs, which may be nested plain data such as a scenario's, every text counts that is the path of a file.
    """
    if path is None:
        return
    try:
        if path.is_dir():
            raise MemboundError(f"{option} is '{path}', which is a folder; give a file")
        if not path.absolute().parent.is_dir():
            raise MemboundError(f"{option} is '{path}', whose folder does not exist; make it, or give another")
        exists = path.exists()
    except MemboundError:
        raise
    except (OSError, ValueError) as error:
        raise MemboundError(f"{option} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    for given in _texts(inputs) if exists else ():
        if _is_same_file(path, given):
            raise MemboundError(f"{option} is '{path}', the file that '{given}' is read from; give another file")


def check_suffix(option: str, path: Path | None, *suffixes: str) -> None:
    """Raises MemboundError where the name of a file says that it is something else than what is written."""
    if path is not None and path.suffix.lower() not in suffixes:
        raise MemboundError(f"{option} is '{path}'; give a file that ends in {' or '.join(suffixes)}")


def write_rows(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows as CSV, or as Parquet where the name ends so; what a row lacks is empty. Raises MemboundError."""
    try:
        if path.suffix.lower() == ".parquet":
            import pyarrow
            from pyarrow import parquet

            named = {column: _column([row.get(column) for row in rows]) for column in columns}
            parquet.write_table(pyarrow.table(named), path)
            return
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise MemboundError(f"'{path}' cannot be written: {error.strerror or error}") from None


def _column(values: list[Any]) -> Any:
    """Values as an Arrow column: of one type, or all as text."""
    import pyarrow

    try:
        return pyarrow.array(values)
    except pyarrow.ArrowException:
        return pyarrow.array([None if value is None else str(value) for value in values])


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str | Path):
        yield str(values)
    elif isinstance(values, dict):
        yield from _texts(values.values())
    elif isinstance(values, Iterable):
        for value in values:
            yield from _texts(value)


def _is_same_file(path: Path, given: str) -> bool:
    try:
        return path.samefile(Path(given).expanduser())
    except (OSError, ValueError, RuntimeError):
        return False
