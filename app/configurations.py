"""What is a configuration that a person keeps beside the present one, and how is it written into a URL?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from urllib.parse import quote, unquote

from membound.roofline import models
from membound.roofline.hardware import get_hardware
from membound.roofline.operating_point import PHASES, OperatingPoint, Phase
from membound.roofline.parallel import Parallelism
from membound.roofline.techniques import TECHNIQUES, engine_setup

# Neither of them stands in a quoted name.
BETWEEN, WITHIN = ":", "+"
MOST_CHARACTERS = 400
MOST_NUMBER = 10_000_000


@dataclass(frozen=True)
class Configuration:
    """An operating point by names and numbers, as the widgets of Explore hold it."""

    model: str
    device: str
    phase: Phase
    context: int
    batch: int
    tp: int
    gamma: int
    techniques: tuple[str, ...]

    def point(self) -> OperatingPoint:
        """The operating point; raises MemboundError where its device cannot be had."""
        model = models.get_model(self.model)
        setup = engine_setup([TECHNIQUES[name](name=name) for name in self.techniques], published=model.published)
        setup = replace(setup, parallel=Parallelism(tp=self.tp))
        return OperatingPoint(model, get_hardware(self.device), setup, self.phase, self.batch, self.context, self.gamma)

    def written(self) -> str:
        """The configuration as a URL holds it, without a comma."""
        parts = [WITHIN.join(part) if isinstance(part, tuple) else quote(str(part), safe="") for part in astuple(self)]
        return BETWEEN.join(parts)


def read(text: str, devices: Sequence[str]) -> Configuration | None:
    """The configuration that a URL holds, on one of these devices; None where it holds none that is known here."""
    parts = text[:MOST_CHARACTERS].split(BETWEEN)
    if len(parts) != len(fields(Configuration)):
        return None
    *names, numbers, techniques = unquote(parts[0]), unquote(parts[1]), parts[2], parts[3:7], parts[7]
    model, device, phase = names
    counts = [int(number) for number in numbers if number.isascii() and number.isdecimal()]
    named = tuple(techniques.split(WITHIN)) if techniques else ()
    known = model in models.catalog() and device in devices and all(name in TECHNIQUES for name in named)
    found = next((one for one in PHASES if one == phase), None)
    if not known or found is None or len(counts) != 4 or not all(0 < count <= MOST_NUMBER for count in counts):
        return None
    context, batch, tp, gamma = counts
    return Configuration(model, device, found, context, batch, tp, gamma, named)


def told_apart(configurations: Sequence[Configuration]) -> list[str]:
    """The fields in which some of them differ; the batch where there is none."""
    names = [field.name for field in fields(Configuration)]
    differing = [name for name in names if len({getattr(one, name) for one in configurations}) > 1]
    return differing or ["batch"]
