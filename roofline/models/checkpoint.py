"""In which formats are a model's weights published?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

from pydantic import model_validator

from membound.roofline.errors import MemboundError
from membound.roofline.models.base import Frozen
from membound.roofline.precision import get_precision
from membound.roofline.precision.names import parse_plan
from membound.roofline.precision.plan import PARTS, PrecisionPlan


class Checkpoint(Frozen):
    """The formats of a published checkpoint; its name alone means those that usually go with it.

    `weights` is a name of `roofline/precision/`. Without `activations` they are what that format is usually
    multiplied with: fp8 with fp8, MXFP4 and int4 with 16 bits. `parts` maps parts to the formats of weights
    that they have instead, and `plain` names those that stay in 16 bits beyond those that usually do.
    """

    weights: str
    activations: str | None = None
    parts: tuple[tuple[str, str], ...] = ()
    plain: tuple[str, ...] = ()
    source: str = ""

    @model_validator(mode="before")
    @classmethod
    def _of_a_name(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"weights": given}
        if isinstance(given, Mapping) and isinstance(given.get("parts"), Mapping):
            return {**given, "parts": tuple(given["parts"].items())}
        return given

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if unknown := [part for part in (*dict(self.parts), *self.plain) if part not in PARTS]:
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
        parts = {part: get_precision(format) for part, format in self.parts}
        kept = dict(plan.exceptions) | parts | dict.fromkeys(self.plain, plan.plain)
        return replace(plan, exceptions=tuple(kept.items()), assumed=())


# Words of a checkpoint's name, in the order in which they decide, with the format that hubs mean by them: AWQ and GPTQ
# have a scale for 128 weights, llm-compressor's FP8-dynamic one for a row and a token, Transformers' bnb-4bit is nf4.
_NAMED: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(rf"(?<= )(?:{words})(?= |$)"), format)
    for words, format in (
        (r"(i?q\d(?: (?:0|1|nl|xx?s|s|m|k(?: (?:s|m|l|xl))?))?)", r"\1"),
        (r"(?:awq|gptq) (?:.* )?(?:int8|8bit)", "w8a16"),
        (r"(awq|gptq|mxfp4)", r"\1"),
        (r"nvfp4|fp4", "nvfp4"),
        (r"fp8 dynamic", "fp8_dynamic"),
        (r"fp8 block", "fp8_block"),
        (r"fp8", "fp8"),
        (r"(w\d+a(?:fp)?\d+)", r"\1"),
        (r"int8", "w8a8"),
        (r"bnb 4bit", "nf4"),
        (r"int4|4bit", "w4a16"),
        (r"8bit", "w8a16"),
        (r"bf16|fp16|f16", "bf16"),
    )
)
# Whose own fp8 has a scale for 128x128 weights (their config.json); a repacked one names another organisation.
_FP8_IN_BLOCKS = re.compile(r"(?:qwen/|deepseek-ai/)?(?:qwen|deepseek)[^/]*")


def named_checkpoint(name: str) -> Checkpoint | None:
    """The formats that a checkpoint's own name tells, as `Qwen/Qwen3-32B-AWQ` does; None where it tells none."""
    spelled = name.strip().lower()
    words = " ".join(re.findall(r"[0-9a-z]+", spelled.rsplit("/", 1)[-1]))
    for pattern, format in _NAMED:
        if found := pattern.search(words):
            weights = found.expand(format).replace(" ", "_")
            if weights == "fp8" and _FP8_IN_BLOCKS.fullmatch(spelled):
                weights = "fp8_block"
            try:
                return Checkpoint(weights=weights, source=f"the name {name!r}")
            except ValueError:
                return None
    return None
