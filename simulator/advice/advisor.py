"""Which technique should come next at this operating point, why, and at what price?

Every move is costed on the engine as the scenario has it: techniques that it lacks are added (or take the place of what
they exclude), those that it has are compared with the engine without them. The rules of the decision guide name first
moves by hand; where they hold, the advice says whether costing agrees.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec, get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.progress import Progress, silent
from membound.roofline.results.comparison import UNITS
from membound.roofline.scenario import Scenario
from membound.roofline.techniques import GainMetric
from membound.simulator.advice.moves import MOST_SEATS, Move, excludes, moves_of
from membound.simulator.advice.rules import RULES, Rule, Situation, attacks, losing_drafts
from membound.simulator.advice.situation import situation_of
from membound.simulator.busiest import at_its_busiest
from membound.simulator.costing import ClosedForm, Costing, Served, simulated
from membound.simulator.deployment import check_context, deployment_of
from membound.simulator.load import Load
from membound.simulator.stacking.asked import closed_loop
from membound.simulator.stacking.stacking import engine_said
from membound.simulator.steady import Steady, load_of, refuse_what_only_runs_show
from membound.simulator.workers import Workers

# A gain below this is not worth a line of what not to combine.
NOTICEABLE = 1.02
# Together less than this share of the product: two moves that save the same.
OVERLAP = 0.9
PAIRED = 6
# A gain this near to 1 is none, and no loss.
UNCHANGED = 0.005


@dataclass(frozen=True)
class Advised:
    """A move with its gains; None where it is not possible, and `reason` says why."""

    move: Move
    gain: float | None
    other_gain: float | None
    low: float | None
    high: float | None
    before: Served | None
    after: Served | None
    why: str

    @property
    def gain_per_device(self) -> float | None:
        """The gain of each device's throughput, where the move takes more of them."""
        ends = self.move.before, self.move.after
        devices = [end.parallel.devices for end in ends if end is not None]
        if self.before is None or self.after is None or len(set(devices)) < 2:
            return None
        return self.after.better(self.before, "output_tokens_per_s") * devices[0] / devices[1]


@dataclass(frozen=True)
class Followed:
    """A rule that holds: the moves it names, and whether the first two by gain have one of them."""

    rule: Rule
    why: str
    agrees: bool | None


@dataclass(frozen=True)
class Conflict:
    """Moves that should not be added up: they exclude each other, are `slower` together, or their gains overlap."""

    moves: tuple[str, ...]
    product: float | None
    real: float | None
    reason: str
    slower: bool = False


@dataclass(frozen=True)
class Advice:
    """Everything that is said of an operating point; moves are in the order of their gains."""

    scenario: Scenario
    hardware: HardwareSpec
    metric: GainMetric
    metric_reason: str
    now: Served | None
    situation: Situation
    moves: tuple[Advised, ...]
    rules: tuple[Followed, ...]
    conflicts: tuple[Conflict, ...]
    conditions: str
    by: str

    def __repr__(self) -> str:
        """One line, as a notebook shows it: every move has two scenarios."""
        gains = ", ".join(f"{one.move.name} {one.gain:.2f}x" for one in self.moves[:3] if one.gain is not None)
        return f"<Advice: {self.conditions}; {len(self.moves)} moves in {self.metric}{': ' if gains else ''}{gains}>"


# --- costing ---


def advise(
    scenario: Scenario,
    *,
    batch: int | None = None,
    context: int | None = None,
    metric: GainMetric | None = None,
    simulate: bool = False,
    pairs: bool = True,
    workers: Workers | None = None,
    progress: Progress = silent,
) -> Advice:
    """What to do next at the scenario's operating point, or with `batch` sequences under way of `context` tokens each.

    Without `pairs`, which take longer to cost than all moves alone, nothing is said of what should not be added up.
    Raises MemboundError where the scenario names something unknown.
    """
    scenario = scenario.model_copy(update={"sweep": ()})
    if scenario.cluster is not None:
        raise MemboundError(
            "field 'cluster' names replicas, and advice is of one engine; remove it, and give one engine's share of "
            "workload.arrivals"
        )
    if not simulate:
        refuse_what_only_runs_show(scenario)
    model, hardware = resolve_model(scenario.model), get_hardware(scenario.hardware)
    deployment = deployment_of(scenario, model, hardware)
    load = load_of(scenario, deployment, at_busiest=True)
    if batch is not None or context is not None:
        clients = batch or max(1, round(load.concurrency))
        lengths = load.lengths if context is None else load.lengths.at_context(context)
        check_context(model, lengths)
        scenario = closed_loop(scenario, clients, lengths, context)
        deployment, load = deployment_of(scenario, model, hardware), Load(float(clients), lengths)
    elif simulate:
        scenario = at_its_busiest(scenario)
    Steady(deployment, load).check_steps()
    situation = situation_of(scenario, deployment, load)
    wanted: GainMetric = "output_tokens_per_s" if situation.waits else "tpot_s"
    metric_reason = "as asked for" if metric else _metric_reason(situation)
    metric = metric or wanted
    error = Steady(deployment, load).relative_error

    # What comes beyond what is served waits without end: whatever seats there are, somebody wants them.
    asked = math.inf if load.overload_rps else load.concurrency
    steady_load = replace(load, concurrency=max(load.concurrency, MOST_SEATS)) if load.overload_rps else load
    costing = Costing(simulated, workers or Workers()) if simulate else Costing(ClosedForm(steady_load))
    moves = list(moves_of(scenario, model, hardware, load.lengths.prompt_tokens + load.lengths.output_tokens, asked))
    costing.ahead([end for move in moves for end in (move.before, move.after) if end], progress)
    advised = sorted((_advised(move, costing, metric, error) for move in moves), key=_by_gain)
    now = costing.served(scenario)
    return Advice(
        scenario,
        hardware,
        metric,
        metric_reason,
        None if isinstance(now, str) else now,
        situation,
        tuple(advised),
        tuple(_followed(situation, advised)),
        tuple(_conflicts(advised, costing, metric)) if pairs else (),
        _conditions(scenario, hardware, load),
        "simulation" if simulate else "closed form",
    )


def _metric_reason(situation: Situation) -> str:
    """Why gains are of throughput, or of the time per token."""
    if situation.queued:
        return f"{situation.queued:.0f} requests wait for a seat, so that throughput decides how long"
    if situation.overload_rps:
        return "more requests arrive than are served, so that throughput decides"
    return "no request waits, so that a user feels the time per token"


def _by_gain(advised: Advised) -> tuple[Any, ...]:
    """Moves with gains first, the largest first, but those with a heavy price in quality after all that gain without;
    then what makes a model fit, the least loss first; then the rest."""
    if advised.gain is not None:
        return (0, advised.gain <= 1.0 or advised.move.quality.heavy, -advised.gain)
    return (1, advised.move.quality.rank, advised.after.tpot_s) if advised.after else (2, advised.move.quality.rank)


def _advised(move: Move, costing: Costing, metric: GainMetric, error: float) -> Advised:
    if move.after is None:
        return Advised(move, None, None, None, None, None, None, move.reason or "")
    before, after = costing.served(move.before), costing.served(move.after)
    if isinstance(after, str):
        return Advised(move, None, None, None, None, None, None, after)
    if isinstance(before, str):
        return Advised(move, None, None, None, None, None, after, f"makes it fit: without it, {before}")
    other: GainMetric = "output_tokens_per_s" if metric == "tpot_s" else "tpot_s"
    gain = after.better(before, metric)
    why = _why(move, before, after, gain)
    within = 1.0 + after.gain_error(before, error)
    return Advised(move, gain, after.better(before, other), gain / within, gain * within, before, after, why)


_BOUND_WORDS = {
    "memory_weights": "reading weights",
    "memory_kv": "reading the KV cache",
    "compute": "arithmetic",
    "link": "links between devices",
    "overhead": "overhead",
    "idle": "waiting for requests",
    "drafting": "drafting",
}
_TARGETS = {"weights": "memory_weights", "kv": "memory_kv"}


def _why(move: Move, before: Served, after: Served, gain: float) -> str:
    """One sentence with the numbers that make the gain what it is, or the loss."""
    if gain < 1.0 - UNCHANGED:
        return _why_slower(before, after)
    binds = f"{_BOUND_WORDS[before.bottleneck]} takes {before.shares[before.bottleneck]:.0%} of the time"
    quickens_prompts = move.technique is None or "compute" in move.technique.attacks
    if quickens_prompts and (before.prompt_share or 0.0) >= 0.5:
        binds = f"prompts take {before.prompt_share:.0%} of the time; {binds}"
    if move.name == "more_seats":
        return f"{binds}; {after.batch:.0f} sequences share a step instead of {before.batch:.0f}"
    if after.batch > 1.05 * before.batch:
        return f"{binds}; memory holds {after.batch:.0f} sequences instead of {before.batch:.0f}"
    technique = move.technique
    if technique is not None and technique.layer in _TARGETS:
        target = _TARGETS[technique.layer]
        if "compute" in technique.attacks and before.shares["compute"] > before.shares[target]:
            target = "compute"
        if before.bottleneck == target:
            return f"{binds}, the largest part"
        return f"{_BOUND_WORDS[target]} takes {before.shares[target]:.0%} of the time, while {binds}"
    if technique is not None and technique.layer == "steps":
        drafts = after.shares.get("drafting", 0.0)
        drafting = f", of which {drafts:.0%} drafting" if drafts >= 0.005 else ""
        return (
            f"{binds}; several tokens share a step{drafting}, which is then bound by {_BOUND_WORDS[after.bottleneck]}"
        )
    if technique is not None and technique.works_by:
        return f"{binds}; {technique.works_by}"
    return binds


def _why_slower(before: Served, after: Served) -> str:
    """What grows most of the engine's time for a token of output; where none does, what passes between the tokens."""
    was, now = (
        {bound: share / served.output_tokens_per_s for bound, share in served.shares.items()}
        for served in (before, after)
    )
    grown = max(now, key=lambda bound: now[bound] - was.get(bound, 0.0))
    more = now[grown] - was.get(grown, 0.0)
    if after.output_tokens_per_s < before.output_tokens_per_s and more > 0.0:
        took = f", instead of {was[grown] * 1e3:.3g} ms" if was.get(grown) else ""
        return f"a loss: {_BOUND_WORDS[grown]} takes {now[grown] * 1e3:.3g} ms of the engine's time for a token{took}"
    if after.batch > before.batch + 0.5:
        return f"a loss: {after.batch:.0f} sequences share a step instead of {before.batch:.0f}; together they gain"
    return "a loss: others' prompts pass between a request's tokens"


# --- rules and conflicts ---


def _followed(situation: Situation, advised: Sequence[Advised]) -> Iterator[Followed]:
    """The rules that hold, and whether costing agrees: one of the two best techniques is a first move of the rule.

    R0 names what attacks the bottleneck; R5 is right where the speculation that it names is slower than none.
    """
    techniques = [one for one in advised if one.move.technique is not None and one.move.state != "on"]
    costed = [one for one in techniques if one.gain is not None] or [one for one in advised if one.after is not None]
    best = [one.move.name for one in costed][:2]
    gains = {one.move.name: one.gain for one in advised if one.gain is not None}
    for rule in RULES:
        if not rule.holds(situation):
            continue
        wanted = attacks(situation.bottleneck) if rule.id == "R0" else rule.first_moves
        known = set(wanted) & {one.move.name for one in costed}
        agrees = bool(known & set(best)) if known else None
        if rule.id == "R5":
            slower = [gains[one.name] < 1.0 for one in losing_drafts(situation) if one.name in gains]
            agrees = all(slower) if slower else None
        yield Followed(replace(rule, first_moves=wanted), rule.why(situation), agrees)


def _conflicts(advised: Sequence[Advised], costing: Costing, metric: GainMetric) -> Iterator[Conflict]:
    """Of the moves that gain most: those that exclude each other, and those whose gains overlap."""
    worth = [
        one
        for one in advised
        if one.gain is not None and one.gain >= NOTICEABLE and one.move.state != "on" and one.move.technique
    ][:PAIRED]
    for layer in ("weights", "steps"):
        rivals = [one.move.technique for one in worth if one.move.technique and one.move.technique.layer == layer]
        excluded = [one for one in rivals if any(excludes(one, other) for other in rivals if other is not one)]
        if excluded:
            yield Conflict(tuple(one.name for one in excluded), None, None, "they exclude each other: take one of them")
    for one, other in itertools.combinations(worth, 2):
        first, second = one.move.technique, other.move.technique
        assert first is not None and second is not None and one.gain is not None and other.gain is not None
        if excludes(first, second):
            continue
        gone = {*one.move.instead_of, *other.move.instead_of}
        kept = tuple(t for t in one.move.before.techniques if t.name not in gone)
        found = costing.served(one.move.before.with_techniques((*kept, first, second)))
        product = one.gain * other.gain
        if isinstance(found, str):
            yield Conflict((first.name, second.name), product, None, found)
            continue
        assert one.before is not None
        real = found.better(one.before, metric)
        slower = real < max(one.gain, other.gain)
        if slower:
            reason = "together they are slower than the better of them alone"
        elif real < OVERLAP * product:
            reason = "their gains overlap: do not multiply them"
        else:
            continue
        yield Conflict((first.name, second.name), product, real, reason, slower)


def _conditions(scenario: Scenario, hardware: HardwareSpec, load: Load) -> str:
    name, lengths, devices = resolve_model(scenario.model).name, load.lengths, scenario.parallel.devices
    where = f"{devices} x {hardware.name}" if devices > 1 else hardware.name
    busiest = "" if load.busiest is None else f" in the busiest part ({load.busiest})"
    under_way = f"{load.concurrency:.0f}"
    return (
        f"{name} on {where}, {under_way} request{'' if under_way == '1' else 's'} under way{busiest}, "
        f"{lengths.prompt_tokens:.0f} tokens in and {lengths.output_tokens:.0f} out, {engine_said(scenario)}"
    )


# --- what `membound advise --json` prints ---


def to_json(advice: Advice) -> dict[str, Any]:
    situation = advice.situation
    return {
        "scenario": advice.scenario.model_dump(mode="json"),
        "conditions": advice.conditions,
        "by": advice.by,
        "metric": advice.metric,
        "metric_reason": advice.metric_reason,
        "unit": UNITS[advice.metric],
        "now": None if advice.now is None else advice.now.document(),
        "bottleneck": situation.bottleneck if advice.now is None else advice.now.bottleneck,
        "roof_seconds": situation.seconds,
        "situation": {
            "batch": situation.batch,
            "fits": situation.fits,
            "queued": situation.queued,
            "overload_rps": situation.overload_rps,
            "ridge_tokens": situation.ridge_tokens,
            "prompts_per_output": situation.prompts_per_output,
            "prompt_share": situation.prompt_share,
        },
        "moves": [_move_json(one) for one in advice.moves],
        "rules": [
            {
                "id": one.rule.id,
                "condition": one.rule.condition,
                "advice": one.rule.advice,
                "first_moves": list(one.rule.first_moves),
                "why": one.why,
                "agrees": one.agrees,
                "source": one.rule.source,
            }
            for one in advice.rules
        ],
        "do_not_combine": [
            {"moves": list(c.moves), "product": c.product, "real": c.real, "slower": c.slower, "reason": c.reason}
            for c in advice.conflicts
        ],
    }


def _move_json(one: Advised) -> dict[str, Any]:
    move = one.move
    parameters = {} if move.technique is None else move.technique.model_dump(mode="json", exclude={"name"})
    speculates = move.technique is not None and move.technique.layer == "steps"
    return {
        "move": move.name,
        "title": move.title,
        "state": move.state,
        "instead_of": list(move.instead_of),
        "parameters": parameters,
        "drafting": one.after.drafting if speculates and one.after is not None else None,
        "baseline": move.baseline,
        "gain": one.gain,
        "low": one.low,
        "high": one.high,
        "other_gain": one.other_gain,
        "gain_per_device": one.gain_per_device,
        "possible": one.after is not None,
        "lossless": move.quality.rank == 0,
        "quality": {**asdict(move.quality), "heavy": move.quality.heavy},
        "price": move.price or None,
        "bottleneck_before": None if one.before is None else one.before.bottleneck,
        "bottleneck_after": None if one.after is None else one.after.bottleneck,
        "reason": one.why,
    }
