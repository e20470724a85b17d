"""What do all parts of a scenario have in common?"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# No model takes more tokens; beyond it a number is a slip of the hand.
MAX_TOKENS = 10_000_000
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class Part(BaseModel):
    """A part of a scenario: unknown fields are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
