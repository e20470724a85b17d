"""What does a technique do to an engine: to bytes, FLOPs and steps of a token, to its speed, and where does it stop?

Each technique is costed alone, on the engine with and without it, by the closed forms of a steady load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from membound.roofline.chosen_experts import distinct_experts
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.models.ffn import MoeFfn
from membound.roofline.models.files import resolve_model
from membound.roofline.scenario import Scenario
from membound.roofline.techniques import GainMetric, Technique
from membound.simulator.advice.moves import excludes
from membound.simulator.costing import ClosedForm, Served
from membound.simulator.deployment import SpeculatingDeployment, deployment_of, with_room_for
from membound.simulator.drafting import with_best_drafts
from membound.simulator.load import Load
from membound.simulator.steady import Steady


class PerToken(NamedTuple):
    """What one device moves and computes for a token of output, and the steps that its sequence takes for it.

    Drafting is left out: it is in the times.
    """

    bytes: float
    flops: float
    steps: float

    def against(self, before: PerToken) -> PerToken:
        """The ratios to another: below 1 is less."""
        return PerToken(*(mine / other for mine, other in zip(self, before, strict=True)))


@dataclass(frozen=True)
class CostedEngine:
    """An engine under a load: its speed, its work for a token, and how far off the time of its steps may be."""

    served: Served
    work: PerToken
    relative_error: float


@dataclass(frozen=True)
class Effect:
    """A technique alone on an engine. `after` is None where it is not possible, `before` where only it makes the model
    fit; `reason` says why. `error` is the interval's: a gain, where there is one, lies between gain / (1 + error) and
    gain x (1 + error).
    """

    technique: Technique
    baseline: str
    before: CostedEngine | None
    after: CostedEngine | None
    error: float
    reason: str | None = None

    def gain(self, metric: GainMetric) -> float | None:
        """How many times better the engine is with the technique, None where one of the two is not possible."""
        if self.before is None or self.after is None:
            return None
        return self.after.served.better(self.before.served, metric)

    @property
    def work(self) -> PerToken | None:
        """Bytes, FLOPs and steps of a token as shares of those without the technique."""
        return None if self.before is None or self.after is None else self.after.work.against(self.before.work)


class Bench:
    """Engines under one load, each costed once."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self._found: dict[str, CostedEngine | str] = {}

    def engine(self, scenario: Scenario) -> CostedEngine | str:
        """Speed and work of an engine, or in a sentence why it cannot be."""
        digest = scenario.digest
        if digest not in self._found:
            try:
                self._found[digest] = self._costed(scenario)
            except MemboundError as error:
                self._found[digest] = str(error)
        return self._found[digest]

    def effect(self, engine: Scenario, technique: Technique) -> Effect:
        """The technique on top of an engine; what the engine has that excludes it is left out on both sides.

        The load is chosen apart from the engine, whose steps have room for its longest request.
        """
        engine = with_room_for(engine, self.load.lengths)
        others = tuple(one for one in engine.techniques if one.name != technique.name and not excludes(one, technique))
        with_it = engine.with_techniques((*others, technique))
        without = with_it.with_techniques(others)
        baseline = technique.compared_with(without.setup)
        before, after = self.engine(without), self.engine(with_it)
        if isinstance(after, str):
            return Effect(technique, baseline, None if isinstance(before, str) else before, None, 0.0, after)
        if isinstance(before, str):
            return Effect(technique, baseline, None, after, 0.0, before)
        error = after.served.gain_error(before.served, before.relative_error)
        return Effect(technique, baseline, before, after, error)

    def _costed(self, scenario: Scenario) -> CostedEngine:
        sized, drafting = with_best_drafts(scenario, self.load)
        served = ClosedForm(self.load)(sized)._replace(drafting=drafting)
        deployment = deployment_of(sized, resolve_model(sized.model), get_hardware(sized.hardware))
        steady = Steady(deployment, self.load)
        return CostedEngine(served, _work(deployment, steady), steady.relative_error)


def _work(deployment: SpeculatingDeployment, steady: Steady) -> PerToken:
    """Of a decode step, by the tokens that it emits; a static batch runs until its longest output ends, on average
    with fewer sequences than it began with."""
    lengths = steady.lengths
    idle = lengths.longest_output_of(steady.batch) / lengths.output_tokens if steady.is_static else 1.0
    alive = max(1.0, steady.batch / idle)
    cost = deployment.verify_cost(alive, lengths.context)
    emitted = float(deployment.decode_shape(alive, lengths.context).sequences) * deployment.tokens_per_step
    return PerToken(float(cost.bytes) / emitted, float(cost.flops) / emitted, idle / deployment.tokens_per_step)


# --- where a technique starts or stops to pay ---


class Crossing(NamedTuple):
    """Where a curve passes a level, and whether it rises there."""

    at: float
    rises: bool


def crossings(xs: Sequence[float], ys: Sequence[float], level: float = 1.0) -> list[Crossing]:
    """Where the curve through points at growing positive `xs` passes the level, straight between them in ln x."""
    found = []
    for (x0, y0), (x1, y1) in zip(zip(xs, ys, strict=True), list(zip(xs, ys, strict=True))[1:], strict=False):
        above, after = y0 > level, y1 > level
        if above != after:
            part = (level - y0) / (y1 - y0)
            found.append(Crossing(math.exp(math.log(x0) + part * (math.log(x1) - math.log(x0))), after))
    return found


# --- mixtures of experts ---


def share_of_experts(ffn: MoeFfn, tokens: float) -> float:
    """The share of a layer's experts, all equally popular, that a step of so many tokens is expected to read."""
    return float(distinct_experts(float(ffn.experts), float(ffn.top_k), tokens)) / ffn.experts
