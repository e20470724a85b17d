"""What do techniques gain together, against the product of what each gains alone?

Gains do not multiply: each technique moves the bottleneck that the next one finds. A stack starts from the plain engine
and evaluates each technique alone, added one by one in the given order and in the best order, and all together. The
share of each technique in the whole gain is its Shapley value (A value for n-person games, 1953): its mean contribution
over all orders, in ln-gain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from membound.roofline.hardware import HardwareSpec, get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.progress import Progress, silent
from membound.roofline.scenario import Scenario
from membound.roofline.techniques import GainMetric, Technique, remarks
from membound.simulator.costing import ClosedForm, Costing, Served, simulated
from membound.simulator.deployment import deployment_of
from membound.simulator.scheduling.build import batching_of, static_said
from membound.simulator.stacking.asked import Point, chosen_techniques, metric_for, plain_engine, points_of
from membound.simulator.stacking.game import MOST_FACTORIAL, Pair, StackingGame, StackStep
from membound.simulator.steady import Steady
from membound.simulator.workers import Workers

# 2^k subsets are simulated for stacks of up to so many techniques; closed forms take more (MOST_FACTORIAL).
MOST_SIMULATED = 6


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


def notes_of(
    scenario: Scenario, techniques: Sequence[Technique], asked: GainMetric | None, hardware: HardwareSpec
) -> Iterator[str]:
    """What a reader would not expect: techniques of the scenario that are left out, another metric than the scenario's,
    static batches, formats that the device multiplies in another one."""
    plain = plain_engine(scenario, techniques)
    kept = [technique.name for technique in plain.techniques]
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
    if all(scenario.with_techniques((one,)).setup.policy == "static" for one in techniques):
        yield from static_said(plain)
    if hardware.calibration is None:
        said = (remark for one in techniques for remark in remarks(scenario.with_techniques((one,)).setup, hardware))
        yield from dict.fromkeys(said)


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
    points = list(points_of(scenario, chosen, batches, contexts))
    stacks = []
    for index, point in enumerate(points):

        def tell(fraction: float, message: str, index: int = index) -> None:
            progress((index + fraction) / len(points), f"point {index + 1} of {len(points)}, {message}")

        hardware = get_hardware(point.plain.hardware)
        costing = Costing(simulated, workers or Workers()) if simulate else Costing(ClosedForm(point.load))
        bound = simulate and _arrivals_bound(point)
        judged: GainMetric = metric or ("tpot_s" if bound else metric_for(chosen))
        game = StackingGame(chosen, point.plain, costing, judged)
        deployment = deployment_of(point.plain, resolve_model(point.plain.model), hardware)
        error = Steady(deployment, point.load).relative_error
        most = MOST_SIMULATED if simulate else MOST_FACTORIAL
        game.ahead(most, tell)
        found = analyse(game, point.values, error, _conditions(point, hardware, simulate), most)
        notes = (
            *notes_of(scenario, chosen, judged if bound else metric, hardware),
            *_waiting_said(point, hardware, judged),
        )
        stacks.append(replace(found, notes=(*notes, *_BOUND_SAID[judged]) if bound else notes))
    return stacks


# A run serves what arrives, and no technique makes more arrive: of throughput the gain is 1, whatever it does.
_BOUND_SAID: dict[GainMetric, tuple[str]] = {
    "tpot_s": ("gains are of TPOT, since all that arrives is served: tokens/s are those of the arrivals",),
    "output_tokens_per_s": (
        "tokens/s are those of the arrivals, all of which are served: --metric tpot_s shows gains",
    ),
}


def _arrivals_bound(point: Point) -> bool:
    """Whether a run's throughput is that of the arrivals, with which the plain engine keeps up."""
    return point.plain.workload.arrivals.kind != "closed_loop" and not point.load.overload_rps


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
