"""What do all parts of a scenario have in common?"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

# No model takes more tokens; beyond it a number is a slip of the hand.
MAX_TOKENS = 10_000_000
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class Part(BaseModel):
    """A part of a scenario: unknown fields are refused, values do not change, and `true` is not the number 1."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            field: _truths(value) if field in cls.model_fields and _wants_a_number(cls, field) else value
            for field, value in given.items()
        }


class _Truth:
    """A true or false where a number is wanted: pydantic, which would read it as 1 or 0, refuses this."""

    def __init__(self, value: bool) -> None:
        self.value = value

    def __repr__(self) -> str:
        return str(self.value).lower()


def _truths(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_truths(one) for one in value]
    return _Truth(value) if isinstance(value, bool) else value


@cache
def _wants_a_number(part: type[BaseModel], field: str) -> bool:
    """Whether a field takes numbers, and neither true nor false."""
    named = _types_in(part.model_fields[field].annotation)
    return any(one in (int, float) for one in named) and bool not in named


def _types_in(annotation: Any) -> list[Any]:
    inner = get_args(annotation)
    return [found for one in inner for found in _types_in(one)] if inner else [annotation]
