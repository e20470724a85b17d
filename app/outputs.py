"""May a command write to this file? Asked before its work begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    except (OSError, ValueError) as error:
        raise MemboundError(f"{option} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    for given in _texts(inputs) if exists else ():
        if _is_same_file(path, given):
            raise MemboundError(f"{option} is '{path}', the file that '{given}' is read from; give another file")


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
