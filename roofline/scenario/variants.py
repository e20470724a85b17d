"""Which engines does a comparison measure beside the plain one?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, JsonValue, model_validator

from membound.roofline.part import Part
from membound.roofline.techniques import TECHNIQUES, AnyTechnique, GainMetric, engine_setup

if TYPE_CHECKING:
    from membound.roofline.scenario import Scenario


class Variant(Part):
    """An engine with some `techniques`, one or a stack of them, and settings that `set` changes by dotted paths.

    It is compared with the plain engine, or with one that has the techniques `beside` too. Its gain is in `metric`,
    else in that which its techniques have in common, else in output tokens a second.
    """

    name: str = Field(pattern=r"^\S(.*\S)?$", max_length=200)
    techniques: tuple[AnyTechnique, ...] = ()
    beside: tuple[AnyTechnique, ...] = ()
    set: dict[str, JsonValue] = Field(default_factory=dict)
    metric: GainMetric | None = None

    @model_validator(mode="after")
    def _is_an_engine_of_its_own(self) -> Variant:
        if not self.techniques and not self.set:
            raise ValueError(f"variant '{self.name}' changes nothing; give it techniques, or settings in set")
        engine_setup((*self.beside, *self.techniques))  # refuses those that exclude each other
        return self

    @property
    def gain_metric(self) -> GainMetric:
        """What its gain is measured in."""
        metrics = {technique.gain_metric for technique in self.techniques}
        return self.metric or (metrics.pop() if len(metrics) == 1 else "output_tokens_per_s")

    @property
    def lossless(self) -> bool:
        """Whether the output stays what it was; settings of an engine never change it."""
        return all(technique.lossless for technique in self.techniques)

    @property
    def title(self) -> str:
        """For people: the title of a technique that stands alone, else the name."""
        alone = len(self.techniques) == 1 and self.name == self.techniques[0].name
        return self.techniques[0].title if alone else self.name

    @property
    def needs_batch(self) -> bool:
        """Whether it means nothing at a batch of one."""
        return any(technique.needs_batch for technique in (*self.techniques, *self.beside))

    def baseline(self, plain: Scenario) -> Scenario:
        """What it is compared with, where `plain` is the plain engine's scenario."""
        return plain.with_techniques(self.beside) if self.beside else plain

    def scenario(self, plain: Scenario) -> Scenario:
        """The scenario of its engine; raises MemboundError where a setting does not exist or fit."""
        return plain.with_techniques((*self.beside, *self.techniques)).with_values(self.set)

    def compared_with(self, baseline: Scenario) -> str:
        """Its baseline in words."""
        if len(self.techniques) == 1 and not self.set:
            return self.techniques[0].compared_with(baseline.setup)
        return ", ".join(technique.title for technique in self.beside) or "plain engine"


def completed(listed: Iterable[Any]) -> list[Any]:
    """Variants as they may be written: a technique's name, a technique, a list of those as a stack, or a whole one."""
    return [_completed(one) for one in listed]


def _completed(one: Any) -> Any:
    if isinstance(one, BaseModel):
        return one
    if isinstance(one, dict) and ("techniques" in one or "set" in one):
        return one | {key: _named(one[key]) for key in ("techniques", "beside") if key in one}
    stack = _named(one if isinstance(one, list | tuple) else [one])
    return {"name": " + ".join(_label(part) for part in stack), "techniques": stack}


def _named(techniques: Any) -> Any:
    listed = [techniques] if isinstance(techniques, str | dict) else techniques
    return [{"name": part} if isinstance(part, str) else part for part in listed]


def _label(technique: Any) -> str:
    """A technique's name, with what it was given."""
    if not isinstance(technique, dict):
        return str(technique)
    given = " ".join(_given(key, value) for key, value in technique.items())
    name = str(technique.get("name"))
    rest = given.replace(name, "", 1).strip()
    return f"{name} {rest}".strip() if name in TECHNIQUES else name


def _given(key: str, value: Any) -> str:
    """A word says by itself what it is, but for the formats of what is not the weights."""
    if key == "activations":
        return f"{value} activations"
    return str(value) if isinstance(value, str) and key != "lm_head" else f"{key} {value}"
