"""What is stacked, on which plain engine, and where?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.reading.meant import setting_meant, technique_meant
from membound.roofline.reading.nearest import did_you_mean
from membound.roofline.reading.problems import one_sentence
from membound.roofline.scenario import Scenario
from membound.roofline.techniques import TECHNIQUES, GainMetric, Technique
from membound.simulator.busiest import at_its_busiest
from membound.simulator.deployment import check_context, deployment_of, with_room_for
from membound.simulator.load import Lengths, Load
from membound.simulator.scheduling.build import batching_of
from membound.simulator.steady import load_of


@dataclass(frozen=True)
class Point:
    """An operating point at which a stack is evaluated: the plain engine there, and its load."""

    values: dict[str, Any]
    plain: Scenario
    load: Load


def chosen_techniques(scenario: Scenario, names: Sequence[str] | None) -> tuple[Technique, ...]:
    """The techniques to stack: the scenario's, or those named, as the scenario sets them or by their defaults."""
    known: dict[str, Technique] = {technique.name: technique for technique in scenario.techniques}
    if names is None:
        if not known:
            raise MemboundError(
                f"scenario '{scenario.name}' names no techniques to stack; give some under techniques, or by "
                f"--techniques, of {', '.join(TECHNIQUES)}"
            )
        return scenario.techniques
    chosen = [known.get(name) or _technique(name) for name in names]
    listed = [technique.name for technique in chosen]
    if twice := next((name for name in listed if listed.count(name) > 1), None):
        raise MemboundError(
            f"--techniques names {twice} twice, and a stack has it once; compare its formats as points of a sweep, "
            f"--over 'techniques=[{{name: {twice}, ..}}],[{{name: {twice}, ..}}]'"
        )
    return tuple(chosen)


def _technique(text: str) -> Technique:
    """A technique by its defaults, or in a format: `weight_quantization:int4`."""
    name, _, format = text.partition(":")
    if name not in TECHNIQUES:
        raise MemboundError(_unknown(name))
    if not format:
        return TECHNIQUES[name](name=name)
    if "format" not in TECHNIQUES[name].model_fields:
        raise MemboundError(f"technique '{text}' gives a format, but {name} has none; give {name}")
    try:
        return TECHNIQUES[name].model_validate({"name": name, "format": format})
    except ValidationError as error:
        raise MemboundError(f"technique '{text}': {one_sentence(error)}") from None


def _unknown(name: str) -> str:
    if setting := setting_meant(name):
        # Engines' profiles chunk prompts by themselves, so that leaving the setting out compares it with itself.
        without = "with --set 'engine.batching=continuous'" if setting.startswith("engine.batching") else "without"
        return (
            f"technique '{name}' is a setting of the engine: compare `membound simulate` {without} and with "
            f"--set '{setting}'"
        )
    meant = technique_meant(name)
    said = f"; a scenario says {meant}" if meant else did_you_mean(name, TECHNIQUES)
    return f"technique '{name}' is unknown{said}; known are {', '.join(TECHNIQUES)}"


def plain_engine(scenario: Scenario, techniques: Sequence[Technique]) -> Scenario:
    """The scenario's engine without any of the techniques; of the usual ones it lacks those that are stacked.

    How it schedules, and in which kernels, stays as the scenario says, unless that is stacked: an engine that batches
    continuously does so whatever its weights are in.
    """
    names = {technique.name for technique in techniques}
    kept = tuple(one for one in scenario.techniques if one.layer in ("schedule", "kernels") and one.name not in names)
    with_all = scenario.model_copy(update={"techniques": (*kept, *techniques), "sweep": ()})
    return with_all.with_techniques(kept)


def metric_for(techniques: Sequence[Technique]) -> GainMetric:
    """Time per output token where all techniques are judged by it, else throughput, in which all of them mean
    something."""
    return "tpot_s" if {technique.gain_metric for technique in techniques} == {"tpot_s"} else "output_tokens_per_s"


def points_of(
    scenario: Scenario, techniques: Sequence[Technique], batches: Sequence[int], contexts: Sequence[int]
) -> Iterator[Point]:
    """The plain engine at each batch and context, else at each point of the scenario's sweep, else at its workload.

    A batch is as many clients in a closed loop; a context is what a decode step attends to for each, on average. Where
    the scenario's engine computes prompts in chunks and the plain one does not, steps hold the longest request.
    """
    if not batches and not contexts:
        for values, at_point in scenario.points():
            plain = plain_engine(at_point, techniques)
            if not batching_of(at_point.engine, at_point.setup).whole_prompts:  # its chunks are a technique's
                plain = with_room_for(plain, Lengths.of(plain.workload))
            yield _point(values, plain)
        return
    base = _point({}, plain_engine(scenario, techniques))
    wanted: Sequence[int | None] = contexts or [None]
    for batch in batches or [max(1, round(base.load.concurrency))]:
        for context in wanted:
            lengths = base.load.lengths if context is None else base.load.lengths.at_context(context)
            check_context(resolve_model(base.plain.model), lengths)
            values = {"batch": batch} | ({} if context is None else {"context": context})
            yield Point(values, closed_loop(base.plain, batch, lengths, context), Load(float(batch), lengths))


def _point(values: dict[str, Any], plain: Scenario) -> Point:
    deployment = deployment_of(plain, resolve_model(plain.model), get_hardware(plain.hardware))
    return Point(values, at_its_busiest(plain), load_of(plain, deployment, at_busiest=True))


def closed_loop(plain: Scenario, batch: int, lengths: Lengths, context: int | None) -> Scenario:
    """The same at a batch: that many clients, each of which asks often enough for the loop to fill.

    At another context steps hold the longest request, as seats hold the batch.
    """
    asked = plain.workload.requests or 0
    changes: dict[str, Any] = {
        "engine.max_num_seqs": max(batch, plain.seats),
        "workload.requests": max(min(asked, 20 * batch), 4 * batch),
    }
    if context is not None:
        prompt, output = (max(1, round(tokens)) for tokens in (lengths.prompt_tokens, lengths.output_tokens))
        changes["workload.rank_correlation"] = None
        changes["workload.output_tokens"] = {"kind": "fixed", "tokens": output}
        changes["workload.prompts"] = {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": prompt}}
    elif plain.workload.rows_of_trace:
        trace = plain.workload.arrivals.model_dump(mode="json", exclude={"kind", "speed"})
        changes["workload.prompts"] = {"kind": "trace", **trace}
    changes["workload.arrivals"] = {"kind": "closed_loop", "concurrency": batch}
    plain = plain.with_values(changes)
    return plain if context is None else with_room_for(plain, lengths)
