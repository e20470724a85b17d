"""What can be changed in an engine in one step?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec
from membound.roofline.models import ModelSpec
from membound.roofline.precision.plan import PrecisionPlan
from membound.roofline.scenario import Scenario
from membound.roofline.scenario.workload import SessionPrompts
from membound.roofline.techniques import TECHNIQUES, Technique, engine_setup
from membound.roofline.techniques.quality import LOSSLESS, Quality
from membound.simulator.deployment import deployment_of

MOST_TENSOR_PARALLEL = 64
MOST_SEATS = 1024
State = Literal["add", "on", "instead"]


@dataclass(frozen=True)
class Move:
    """Something to change. `before` and `after` are the engines that are compared; `instead_of` names what goes."""

    name: str
    title: str
    state: State
    before: Scenario
    after: Scenario | None
    baseline: str
    quality: Quality
    instead_of: tuple[str, ...] = ()
    price: str = ""
    technique: Technique | None = None
    reason: str | None = None


def excludes(one: Technique, other: Technique) -> bool:
    try:
        engine_setup((one, other))
    except MemboundError:
        return True
    return False


def moves_of(
    scenario: Scenario, model: ModelSpec, hardware: HardwareSpec, tokens: float, asked: float = 0.0
) -> Iterator[Move]:
    """Everything that can be changed in one step, where a request has `tokens` tokens and `asked` want a seat."""
    has = {technique.name for technique in scenario.techniques}
    for own in scenario.techniques:
        rest = tuple(other for other in scenario.techniques if other is not own)
        yield _technique_move(own, "on", scenario.with_techniques(rest), scenario)
    for name, kind in TECHNIQUES.items():
        technique = kind.advised(model, hardware, scenario.parallel)
        if technique is None or name in has or (kind.usual and name not in scenario.without):
            continue
        if _is_published_so(technique, model.published):
            continue
        rivals = tuple(other for other in scenario.techniques if excludes(other, technique))
        kept = tuple(other for other in scenario.techniques if other not in rivals)
        state: State = "instead" if rivals else "add"
        after = scenario.with_techniques((*kept, technique))
        yield _technique_move(technique, state, scenario, after, tuple(rival.name for rival in rivals))
    yield _wider(scenario, model, hardware, tokens)
    yield from _more_seats(scenario, deployment_of(scenario, model, hardware).largest_batch(tokens), asked)
    yield from _engine_moves(scenario)


def _is_published_so(technique: Technique, published: PrecisionPlan) -> bool:
    """Whether it would quantize to as many bits as the model is published in."""
    if technique.layer != "weights" or published.weights.width >= 16:
        return False
    made = engine_setup((technique,)).precision
    return (made.weights.width, made.activations.width) == (published.weights.width, published.activations.width)


def _technique_move(
    technique: Technique, state: State, before: Scenario, after: Scenario, instead_of: tuple[str, ...] = ()
) -> Move:
    baseline = f"the engine with {', '.join(instead_of)}" if instead_of else technique.compared_with(before.setup)
    return Move(
        technique.name,
        technique.title,
        state,
        before,
        after,
        baseline,
        technique.quality,
        instead_of,
        technique=technique,
    )


def _wider(scenario: Scenario, model: ModelSpec, hardware: HardwareSpec, tokens: float) -> Move:
    """Twice the tensor parallelism; where the model does not fit, as many times as it takes."""
    tp, after, reason = scenario.parallel.tp, None, None
    wider = 2 * tp
    try:
        after = scenario.with_value("parallel.tp", wider)
        while wider < MOST_TENSOR_PARALLEL and deployment_of(after, model, hardware).largest_batch(tokens) < 1.0:
            wider *= 2
            after = scenario.with_value("parallel.tp", wider)
    except MemboundError as error:
        after, reason = None, str(error)
    devices = scenario.parallel.devices
    price = f"{devices * wider // tp} devices instead of {devices}"
    title, baseline = f"tensor parallelism {wider}", f"tensor parallelism {tp}"
    return Move("tensor_parallel", title, "add", scenario, after, baseline, LOSSLESS, price=price, reason=reason)


def _more_seats(scenario: Scenario, fitting: float, asked: float) -> Iterator[Move]:
    """Seats for all that `asked` want and memory has room for, where the engine has fewer."""
    seats = math.floor(min(fitting, asked, MOST_SEATS))
    if seats > scenario.seats:
        after = scenario.with_value("engine.max_num_seqs", seats)
        title, baseline = f"{seats} seats (max_num_seqs)", f"{scenario.seats} seats"
        yield Move("more_seats", title, "add", scenario, after, baseline, LOSSLESS)


def _engine_moves(scenario: Scenario) -> Iterator[Move]:
    """Settings of the engine whose gain only a simulation knows."""
    if isinstance(scenario.workload.prompts, SessionPrompts) and not scenario.engine.prefix_caching:
        after = scenario.with_value("engine.prefix_caching", True)
        yield Move("prefix_caching", "prefix cache", "add", scenario, after, "prompts computed in full", LOSSLESS)
