"""What does a field of somebody else's file hold? Read with its name, so that what is wrong can be said of it."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from membound.roofline.errors import MemboundError

_MOST = 1e19
_MOST_FILE_BYTES = 2 << 30


class Fields:
    """A mapping at a place of a file; every reader raises MemboundError with the place, the field and its value."""

    def __init__(self, document: Any, where: str) -> None:
        if not isinstance(document, dict):
            raise MemboundError(f"{where} is {_kind(document)}, not a mapping of fields")
        self._document: dict[str, Any] = document
        self.where = where

    def has(self, *keys: str) -> bool:
        """Whether all of these are there and not null."""
        return all(self._document.get(key) is not None for key in keys)

    def maybe(self, *keys: str) -> float | None:
        """The number that the first of `keys` holds which is there, or None."""
        for key in keys:
            value = self._document.get(key)
            if value is not None:
                return _number(value, f"{self.where}: field '{key}'")
        return None

    def number(self, *keys: str) -> float:
        value = self.maybe(*keys)
        if value is None:
            raise MemboundError(f"{self.where}: field '{keys[0]}' is missing")
        return value

    def whole(self, key: str) -> int:
        """A number with all its digits."""
        self.number(key)
        return int(self._document[key])

    def numbers(self, key: str) -> list[float]:
        return [_number(value, f"{self.where}: field '{key}', item {i}") for i, value in enumerate(self.items(key))]

    def text(self, *keys: str) -> str | None:
        """The text that the first of `keys` holds which is there, or None."""
        return next((value for key in keys if isinstance(value := self._document.get(key), str) and value), None)

    def items(self, key: str) -> list[Any]:
        value = self._document.get(key)
        if value is None:
            raise MemboundError(f"{self.where}: field '{key}' is missing")
        if not isinstance(value, list):
            raise MemboundError(f"{self.where}: field '{key}' is {_kind(value)}; it must be a list")
        return value

    def fields(self, key: str) -> Fields:
        """The mapping that is the field; an empty one where it is missing or null."""
        value = self._document.get(key)
        return Fields({} if value is None else value, f"{self.where}, {key}")

    def find(self, key: str) -> float | str | None:
        """The first number or text under `key`, however deep: for settings whose place moved between versions."""
        left: list[Any] = [self._document]
        for value in left:
            if isinstance(value, dict):
                found = value.get(key)
                if isinstance(found, str) or (isinstance(found, int | float) and not isinstance(found, bool)):
                    return found if isinstance(found, str) else _number(found, f"{self.where}: field '{key}'")
            left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return None


def _number(value: Any, named: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or abs(value) > _MOST:
        raise MemboundError(f"{named} is {_kind(value)}; it must be a number")
    if value < 0:
        raise MemboundError(f"{named} is {value:g}; it must not be negative")
    return float(value)


def _kind(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return "null" if value is None else reprlib.repr(value)


def documents(path: Path, in_log: Callable[[str], list[dict[str, Any]]] | None = None) -> Iterator[tuple[Any, str]]:
    """The JSON documents of a file and where each stands: one, or one a line; or what `in_log` finds in a text.

    Raises MemboundError with one sentence for a file that cannot be read or is neither.
    """
    named = f"results file '{path}'"
    try:
        if not path.is_file():
            raise MemboundError(f"{named} is no file; give the JSON that a benchmark tool wrote")
        if (size := path.stat().st_size) > _MOST_FILE_BYTES:
            raise MemboundError(f"{named} has {size / 2**30:.1f} GiB, more than the 2 GiB that are read")
        text = path.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        if isinstance(error, MemboundError):
            raise
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise MemboundError(f"{named} cannot be read: {reason}") from None
    if not text.strip():
        raise MemboundError(f"{named} is empty")
    try:
        yield json.loads(text), named
        return
    except RecursionError:
        raise MemboundError(f"{named} is nested too deep to be a benchmark's result") from None
    except ValueError as error:
        whole = error
    if in_log is not None and (found := in_log(text)):
        yield from ((document, f"{named}, report {number}") for number, document in enumerate(found, start=1))
        return
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    for number, line in lines:
        try:
            yield json.loads(line), f"{named}, line {number}"
        except (ValueError, RecursionError):
            if number > lines[0][0]:
                raise MemboundError(f"{named}, line {number} is not JSON; the file may be cut short") from None
            at = getattr(whole, "lineno", number)
            raise MemboundError(f"{named} is not JSON: it goes wrong at line {at}") from None
