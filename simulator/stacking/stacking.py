"""What do techniques gain together, against the product of what each gains alone?

Gains do not multiply: each technique moves the bottleneck that the next one finds. A stack is looked at from the plain
engine on: each technique alone, added one by one in the given and in the best order, all together, and the share of
each in the whole gain (Shapley, A value for n-person games, 1953: its mean contribution over all orders, in ln-gain).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec, get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.progress import Progress, silent
from membound.roofline.reading.meant import setting_meant, technique_meant
from membound.roofline.reading.nearest import did_you_mean
from membound.roofline.reading.problems import one_sentence
from membound.roofline.results.comparison import UNITS
from membound.roofline.scenario import Scenario
from membound.roofline.techniques import TECHNIQUES, GainMetric, Technique, remarks
from membound.simulator.busiest import at_its_busiest
from membound.simulator.costing import ClosedForm, Costing, Served, simulated
from membound.simulator.deployment import check_context, deployment_of, with_room_for
from membound.simulator.load import Lengths, Load
from membound.simulator.scheduling.build import batching_of
from membound.simulator.stacking.game import MOST_FACTORIAL, Pair, StackingGame, StackStep
from membound.simulator.steady import Steady, load_of
from membound.simulator.workers import Workers

# 2^k subsets are simulated for stacks of up to so many techniques; closed forms take more (MOST_FACTORIAL).
MOST_SIMULATED = 6


@dataclass(frozen=True)
class Point:
    """Where a stack is looked at: the plain engine there, and the load."""

    values: dict[str, Any]
    plain: Scenario
    load: Load


@dataclass(frozen=True)
class Stack:
    """The analysis at one point; `reason` says why there is none. Gains are to the plain engine, above 1 is better.

    `members` are the techniques that take part: those of the given order that can join what was there before.
    """

    point: dict[str, Any]
    metric: GainMetric
    conditions: str
    plain: Served | None
    members: tuple[str, ...] = ()
    alone: tuple[StackStep, ...] = ()
    given_order: tuple[StackStep, ...] = ()
    greedy_order: tuple[StackStep, ...] = ()
    best_order: tuple[StackStep, ...] | None = None
    shapley: dict[str, float] | None = None
    pairs: tuple[Pair, ...] = ()
    best_subset: tuple[str, ...] = ()
    best_subset_gain: float = 1.0
    reason: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def together(self) -> float | None:
        """The gain of all members."""
        gains = [step.together for step in self.given_order if step.together is not None]
        return gains[-1] if gains else None

    @property
    def product(self) -> float | None:
        """The product of the members' gains alone; None where one of them cannot run alone."""
        gains = [step.gain for step in self.alone if step.technique in self.members]
        return math.prod(gain for gain in gains if gain is not None) if gains and None not in gains else None


def analyse(game: StackingGame, point: dict[str, Any], error: float, conditions: str, most_factorial: int) -> Stack:
    """The stack of the game's techniques, by all subsets of its members where they are not too many."""
    plain = game.served(frozenset())
    if isinstance(plain, str):
        return Stack(point, game.metric, conditions, None, reason=f"the plain engine is not possible here: {plain}")
    every, members = range(len(game.techniques)), game.members()
    alone = tuple(game.steps(every, error, alone=True))
    given = tuple(game.steps(every, error))
    best, shapley = None, None
    if len(members) <= most_factorial:
        order = game.best_order(members)
        best = None if order is None else tuple(game.steps(order, error))
        shares = game.shapley(members)
        shapley = None if shares is None else {game.techniques[index].name: share for index, share in shares.items()}
    greedy = tuple(game.steps(game.greedy_order(members), error))
    pairs = tuple(game.pairs())
    subset, gain = game.best_known()
    return Stack(
        point,
        game.metric,
        conditions,
        plain,
        tuple(game.techniques[index].name for index in members),
        alone,
        given,
        greedy,
        best,
        shapley,
        pairs,
        tuple(game.techniques[index].name for index in sorted(subset)),
        gain,
    )


# --- what is stacked, where, and by which model of time ---


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
        return (
            f"technique '{name}' is a setting of the engine: compare `membound simulate` without and with "
            f"--set '{setting}'"
        )
    meant = technique_meant(name)
    said = f"; a scenario says {meant}" if meant else did_you_mean(name, TECHNIQUES)
    return f"technique '{name}' is unknown{said}; known are {', '.join(TECHNIQUES)}"


def notes_of(
    scenario: Scenario, techniques: Sequence[Technique], asked: GainMetric | None, hardware: HardwareSpec
) -> Iterator[str]:
    """What a reader would not expect: techniques of the scenario that are left out, another metric than the scenario's,
    formats that the device multiplies in another one."""
    kept = [technique.name for technique in plain_engine(scenario, techniques).techniques]
    if kept:
        yield f"the plain engine keeps {', '.join(kept)} of the scenario: gains are on top of it"
    names = {*kept, *(technique.name for technique in techniques)}
    left = [technique.name for technique in scenario.techniques if technique.name not in names]
    if left:
        yield f"the plain engine is without {', '.join(left)} of the scenario, since --techniques leaves them out"
    metric = metric_for(techniques)
    if asked is None and scenario.techniques and metric != metric_for(scenario.techniques):
        other = "output_tokens_per_s" if metric == "tpot_s" else "tpot_s"
        yield f"these techniques are judged by {metric}, not by {other}; --metric {other} shows that"
    if hardware.calibration is None:
        said = (remark for one in techniques for remark in remarks(scenario.with_techniques((one,)).setup, hardware))
        yield from dict.fromkeys(said)


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


def stack(
    scenario: Scenario,
    *,
    techniques: Sequence[str] | None = None,
    batches: Sequence[int] = (),
    contexts: Sequence[int] = (),
    metric: GainMetric | None = None,
    simulate: bool = False,
    workers: Workers | None = None,
    progress: Progress = silent,
) -> list[Stack]:
    """The stacking analysis of a scenario at each of its points, or at the given batches and contexts."""
    chosen = chosen_techniques(scenario, techniques)
    asked, metric = metric, metric or metric_for(chosen)
    points = list(points_of(scenario, chosen, batches, contexts))
    stacks = []
    for index, point in enumerate(points):

        def tell(fraction: float, message: str, index: int = index) -> None:
            progress((index + fraction) / len(points), f"point {index + 1} of {len(points)}, {message}")

        hardware = get_hardware(point.plain.hardware)
        costing = Costing(simulated, workers or Workers()) if simulate else Costing(ClosedForm(point.load))
        game = StackingGame(chosen, point.plain, costing, metric)
        deployment = deployment_of(point.plain, resolve_model(point.plain.model), hardware)
        error = Steady(deployment, point.load).relative_error
        most = MOST_SIMULATED if simulate else MOST_FACTORIAL
        game.ahead(most, tell)
        found = analyse(game, point.values, error, _conditions(point, hardware, simulate), most)
        notes = (*notes_of(scenario, chosen, asked, hardware), *_waiting_said(point, hardware, metric))
        stacks.append(replace(found, notes=notes))
    return stacks


def _waiting_said(point: Point, hardware: HardwareSpec, metric: GainMetric) -> Iterator[str]:
    """That requests wait for memory of the plain engine, or for a seat though memory would hold more of them."""
    seats, load = point.plain.seats, point.load
    fitting = deployment_of(point.plain, resolve_model(point.plain.model), hardware).largest_batch(load.lengths.context)
    if fitting <= seats:
        if load.concurrency > fitting >= 1:
            yield f"memory holds {fitting:.0f} of the {load.concurrency:.0f} sequences, the others wait"
            if metric == "tpot_s":
                yield "as more of them join, each token takes longer: --metric output_tokens_per_s shows the gain"
        return
    if load.concurrency > seats:
        yield f"{load.concurrency - seats:.0f} requests wait for a seat: engine.max_num_seqs is {seats}"
    elif load.overload_rps:
        yield f"requests wait for a seat, more and more of them: engine.max_num_seqs is {seats}"


def _conditions(point: Point, hardware: HardwareSpec, simulate: bool) -> str:
    lengths, parallel = point.load.lengths, point.plain.parallel
    devices = f"{parallel.devices} x {hardware.name}" if parallel.devices > 1 else hardware.name
    how = "discrete-event simulation" if simulate else "closed form"
    busiest = "" if point.load.busiest is None else f" in the busiest part ({point.load.busiest})"
    under_way = f"{point.load.concurrency:.0f}"
    return (
        f"{resolve_model(point.plain.model).name} on {devices}, {under_way} sequence{'' if under_way == '1' else 's'} "
        f"under way{busiest}, "
        f"{lengths.prompt_tokens:.0f} tokens in and {lengths.output_tokens:.0f} out, {engine_said(point.plain)}, {how}"
    )


def engine_said(scenario: Scenario) -> str:
    """The engine's profile, and how it fills its steps where that is not the techniques' choice."""
    batching = batching_of(scenario.engine, scenario.setup)
    chunks = ", prompts in chunks beside decodes" if not batching.whole_prompts else ""
    return f"engine profile '{scenario.engine.profile}', {scenario.step_tokens} tokens a step{chunks}"


# --- what `membound stack --json` prints ---


def to_json(stacks: Sequence[Stack], techniques: Sequence[Technique]) -> dict[str, Any]:
    """Every point's stack; gains are ratios to the named baseline."""
    about = {technique.name: technique for technique in techniques}
    baselines = {step.technique: step.baseline for stack in stacks for step in stack.alone}
    return {
        "techniques": [
            {
                "name": technique.name,
                "title": technique.title,
                "baseline": baselines.get(technique.name, technique.baseline),
                "family": technique.family,
                "lossless": technique.lossless,
                "parameters": technique.model_dump(mode="json", exclude={"name"}),
            }
            for technique in techniques
        ],
        "stacks": [_stack_json(stack, about) for stack in stacks],
    }


def _stack_json(stack: Stack, about: dict[str, Technique]) -> dict[str, Any]:
    def rows(steps: Sequence[StackStep] | None) -> list[dict[str, Any]] | None:
        return None if steps is None else [_step_json(step, about[step.technique]) for step in steps]

    together, product = stack.together, stack.product
    return {
        "point": stack.point,
        "metric": stack.metric,
        "unit": UNITS[stack.metric],
        "baseline": "the plain engine: none of the techniques",
        "conditions": stack.conditions,
        "reason": stack.reason,
        "notes": list(stack.notes),
        "plain": None if stack.plain is None else stack.plain.document(),
        "members": list(stack.members),
        "alone": rows(stack.alone),
        "given_order": rows(stack.given_order),
        "greedy_order": rows(stack.greedy_order),
        "best_order": rows(stack.best_order),
        "together": together,
        "product": product,
        "ratio": together / product if together is not None and product is not None else None,
        "lossless": all(about[name].lossless for name in stack.members),
        "shapley_ln_gain": stack.shapley,
        "best_subset": {"techniques": list(stack.best_subset), "gain": stack.best_subset_gain},
        "pairs": [
            {
                "techniques": [pair.first, pair.second],
                "product": pair.product,
                "real": pair.real,
                "ratio": pair.ratio,
                "reason": pair.reason,
            }
            for pair in stack.pairs
        ],
    }


def _step_json(step: StackStep, technique: Technique) -> dict[str, Any]:
    return {
        "technique": step.technique,
        "baseline": step.baseline,
        "gain": step.gain,
        "low": step.low,
        "high": step.high,
        "together": step.together,
        "lossless": technique.lossless,
        "batch": step.batch,
        "bottleneck_before": step.bottleneck_before,
        "bottleneck_after": step.bottleneck_after,
        "reason": step.reason,
        "parameters": technique.model_dump(mode="json", exclude={"name"}),
        "drafting": step.drafting,
    }
