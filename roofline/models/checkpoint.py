"""In which formats are a model's weights published?"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, Self

from pydantic import model_validator

from membound.roofline.errors import MemboundError
from membound.roofline.models.base import Frozen
from membound.roofline.precision.names import parse_plan
from membound.roofline.precision.plan import PARTS, PrecisionPlan


class Checkpoint(Frozen):
    """The formats of a published checkpoint; its name alone means those that usually go with it.

    `weights` is a name of `roofline/precision/`. Without `activations` they are what that format is usually
    multiplied with: fp8 with fp8, MXFP4 and int4 with 16 bits. `plain` names parts that stay in 16 bits beyond those
    that usually do.
    """

    weights: str
    activations: str | None = None
    plain: tuple[str, ...] = ()
    source: str = ""

    @model_validator(mode="before")
    @classmethod
    def _of_a_name(cls, given: Any) -> Any:
        return {"weights": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if unknown := [part for part in self.plain if part not in PARTS]:
            raise ValueError(f"no part is called '{unknown[0]}'; parts are {', '.join(PARTS)}")
        try:
            _ = self.plan
        except MemboundError as error:
            raise ValueError(str(error)) from None
        return self

    @cached_property
    def plan(self) -> PrecisionPlan:
        """The formats of every part; the cache has 16 bits."""
        plan = parse_plan(self.weights, self.activations or "")
        kept = dict(plan.exceptions) | dict.fromkeys(self.plain, plan.plain)
        return replace(plan, exceptions=tuple(kept.items()), assumed=())
