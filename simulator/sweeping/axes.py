"""What does an axis of a sweep change? A field of the scenario, or a batch or a context as a decode step sees them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.part import MAX_TOKENS
from membound.roofline.scenario import Scenario, check_path
from membound.simulator.deployment import with_room_for
from membound.simulator.load import Lengths

Axes = Sequence[tuple[str, Sequence[Any]]]
# Points of the product at which a value is tried beside others before it is called wrong.
_TRIED = 256


def at(scenario: Scenario, values: Mapping[str, Any]) -> Scenario:
    """The scenario at a point; a batch and a context hold for what the other values make of it."""
    scenario = scenario.with_values({path: value for path, value in values.items() if path not in _SHORT})
    for name, change in _SHORT.items():
        if name in values:
            scenario = change(scenario, values[name])
    return scenario


def check(scenario: Scenario, axes: Axes) -> None:
    """Raises MemboundError for an axis that the scenario does not have, and for a value that no point can have.

    A value that goes with others alone, such as an expert parallelism with the devices for it, is not wrong.
    """
    document = scenario.model_dump(mode="json")
    for path, values in axes:
        brought = any(path.startswith(f"{other}.") for other, _ in axes)  # by another axis: it is not there yet
        if path not in _SHORT and not brought:
            check_path(document, path)
        for value in values:
            if problem := _problem(scenario, path, value, axes):
                raise MemboundError(f"option --over {path}: {problem}")
            if path in _NAMES:
                _NAMES[path](value)


def _problem(scenario: Scenario, path: str, value: Any, axes: Axes) -> str | None:
    """Why no point with this value is a scenario; None where one is, with the value alone or beside other axes."""
    problem = None
    points = itertools.product(*([value] if axis == path else values for axis, values in axes))
    whole = ({axis: one for (axis, _), one in zip(axes, point, strict=True)} for point in points)
    for tried in itertools.chain([{path: value}], itertools.islice(whole, _TRIED)):
        try:
            at(scenario, tried)
        except MemboundError as error:
            problem = problem or str(error)
        else:
            return None
    return problem


def _batch(scenario: Scenario, value: Any) -> Scenario:
    """So many clients in the closed loop, seats for them, and requests enough for the loop to fill."""
    arrivals, asked = scenario.workload.arrivals, scenario.workload.requests
    if arrivals.kind != "closed_loop":
        raise MemboundError(
            f"how many sequences are under way is a result where workload.arrivals is '{arrivals.kind}'; sweep its "
            "rate, such as workload.arrivals.rate_rps, or --set workload.arrivals={kind: closed_loop, concurrency: 8}"
        )
    batch = _count("batch", value)
    changes = {"engine.max_num_seqs": max(batch, scenario.seats), "workload.arrivals.concurrency": batch}
    if asked is not None:
        changes["workload.requests"] = max(asked, 4 * batch)
    return scenario.with_values(changes)


def _context(scenario: Scenario, value: Any) -> Scenario:
    """Prompts of the length with which a decode step attends to so many tokens on average."""
    prompts, outputs = scenario.workload.prompts, scenario.workload.output_tokens
    prompt, output = (getattr(part, "kind", None) for part in (getattr(prompts, "tokens", None), outputs))
    if prompt != "fixed" or output != "fixed":
        raise MemboundError(
            "prompts and outputs of the scenario have many lengths, so a context is no field of it; sweep "
            "workload.prompts.tokens and workload.output_tokens, such as workload.prompts.tokens={kind: fixed, "
            "tokens: 8192}"
        )
    lengths = Lengths.fixed(1.0, float(getattr(outputs, "tokens", 1))).at_context(_count("context", value))
    changes = {
        "workload.prompts.tokens.tokens": round(lengths.prompt_tokens),
        "workload.output_tokens.tokens": round(lengths.output_tokens),
    }
    return with_room_for(scenario.with_values(changes), lengths)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        raise MemboundError(f"{name} is '{value}'; give a whole number from 1 to {MAX_TOKENS:,}")
    return value


# What names something elsewhere, and who says that there is no such thing.
_NAMES: dict[str, Callable[[str], Any]] = {"hardware": get_hardware, "model": resolve_model}
_SHORT: dict[str, Callable[[Scenario, Any], Scenario]] = {"context": _context, "batch": _batch}
