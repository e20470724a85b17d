"""Which scheduler does a scenario ask for, and how does its record become a result?"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate

import numpy as np

from membound.roofline.cost import pipelined_cost
from membound.roofline.errors import MemboundError
from membound.roofline.models import ModelSpec
from membound.roofline.results.metrics import summarize
from membound.roofline.results.result import Column, Provenance, RunResult
from membound.roofline.scenario import Scenario
from membound.roofline.scenario.engine import DEFAULT_AGEING_S, Engine
from membound.roofline.scenario.tasks import found_of
from membound.roofline.scenario.workload import ClosedLoop, Workload
from membound.roofline.shape import StepShape
from membound.roofline.techniques import Drafts, EngineSetup, NgramDrafts
from membound.roofline.times.engines import get_profile
from membound.roofline.times.operator import Times
from membound.roofline.windows import windows_of
from membound.simulator.scheduling.blocks import BlockTables
from membound.simulator.scheduling.draft_length import AdaptiveLength
from membound.simulator.scheduling.drafter import Drafter, NgramDrafter
from membound.simulator.scheduling.guessing import ModelledDrafter
from membound.simulator.scheduling.kv_memory import KvMemory
from membound.simulator.scheduling.policies import (
    BATCHINGS,
    Admission,
    Batching,
    EarliestDeadline,
    Everybody,
    FirstCome,
    InTime,
    LeastSlack,
    Order,
    PriorityWithAgeing,
    ShortQueue,
    Strict,
)
from membound.simulator.scheduling.prefix import mixed_hash
from membound.simulator.scheduling.recorder import Bounds, Recorder
from membound.simulator.scheduling.request import Sequence
from membound.simulator.scheduling.scheduler import Classify, Scheduler
from membound.simulator.scheduling.workload.covered import covered_said


def build_scheduler(
    scenario: Scenario,
    model: ModelSpec,
    times: Times,
    memory: KvMemory,
    content_known: bool,
    numbered_blocks: bool = False,
    drafter: Drafter | None = None,
) -> Scheduler:
    """The scheduler that the scenario's engine and techniques ask for, over the blocks of `memory`.

    `numbered_blocks` is for an engine that computes, as is its `drafter` where that computes too. Raises MemboundError
    where the scenario contradicts itself.
    """
    setup, engine = scenario.setup, scenario.engine
    batching = batching_of(engine, setup)
    modelled = None
    if drafter is None and isinstance(setup.drafts, NgramDrafts) and content_known:
        drafter = NgramDrafter(setup.drafts)
    elif drafter is None and setup.drafts is not None:
        modelled = _modelled_drafter(scenario.workload, setup.drafts)
    seconds_per_token = _seconds_per_token(scenario, model, times)
    pool, *others = memory.pools()
    return Scheduler(
        batching,
        pool,
        memory.seats,
        scenario.step_tokens,
        drafter or modelled,
        AdaptiveLength(setup.drafts) if setup.drafts is not None and setup.drafts.adaptive else None,
        others=tuple(others),
        order=_order(engine, seconds_per_token),
        admission=_admission(engine, seconds_per_token),
        classify=_classify(scenario),
        swap=engine.preemption == "swap",
        reserved_tokens=engine.reserved_tokens,
        chunks=engine.kv_allocator == "buddy",
        itemized=content_known or drafter is not None or numbered_blocks,
        tables=BlockTables(memory.num_blocks, memory.block_size, memory.fixed_blocks) if numbered_blocks else None,
        max_context=model.max_context,
        micro_batches=setup.parallel.most_micro_batches,
        windows=windows_of(model, setup),
    )


def batching_of(engine: Engine, setup: EngineSetup) -> Batching:
    """As the engine says, else as the techniques make it: a continuous one by its profile's default."""
    if engine.batching == "static" and setup.policy != "static":
        raise MemboundError(
            f"field 'engine.batching' is 'static', but a technique makes it {setup.policy}; remove one of them"
        )
    usual = get_profile(engine.profile).batching if setup.policy == "continuous" else None
    return BATCHINGS[engine.batching or usual or setup.policy]


def _modelled_drafter(workload: Workload, drafts: Drafts) -> ModelledDrafter:
    """Finds a draft as often as in the workload's task, else as often as the technique says."""
    found = found_of(workload, drafts.kind)
    return ModelledDrafter(drafts if found is None else replace(drafts, hit_rate=found), workload.seed)


def _order(engine: Engine, seconds_per_token: float) -> Order:
    match engine.order:
        case "priority":
            return PriorityWithAgeing(engine.ageing_s or DEFAULT_AGEING_S)
        case "deadline":
            return EarliestDeadline()
        case "slack":
            return LeastSlack(seconds_per_token)
        case _:
            return FirstCome()


def _admission(engine: Engine, seconds_per_token: float) -> Admission:
    if engine.admission is None:
        return Everybody()
    rules: list[Admission] = []
    if engine.admission.max_waiting is not None:
        rules.append(ShortQueue(engine.admission.max_waiting))
    if engine.admission.only_in_time:
        rules.append(InTime(seconds_per_token))
    return Strict(tuple(rules))


def _classify(scenario: Scenario) -> Classify | None:
    """Draws the class of each request from the workload's seed and its id."""
    engine, slo = scenario.engine, scenario.slo
    in_time = engine.order in ("deadline", "slack") or (engine.admission and engine.admission.only_in_time)
    due = [one.ttft_s or slo.ttft_s for one in engine.classes] or [slo.ttft_s]
    if in_time and None in due:
        raise MemboundError(
            "the engine serves by deadlines, but some requests have none; give slo.ttft_s, or ttft_s in each of "
            "engine.classes"
        )
    if not engine.classes and not in_time:
        return None
    reached = [0.0, *accumulate(one.share for one in engine.classes)]
    priorities = [one.priority for one in engine.classes] or [0]

    def classify(sequence: Sequence) -> None:
        draw = mixed_hash(scenario.workload.seed, sequence.id) / 2**64
        index = min(bisect_right(reached, draw) - 1, len(due) - 1) if engine.classes else 0
        sequence.service_class, sequence.priority = index, priorities[index]
        if (ttft_s := due[index]) is not None:
            sequence.deadline_s = sequence.request.arrival_s + ttft_s

    return classify


def _seconds_per_token(scenario: Scenario, model: ModelSpec, times: Times) -> float:
    """Seconds of prefill for each token of a full step: no engine is faster."""
    tokens = float(min(scenario.step_tokens, model.max_context))
    together = float(scenario.setup.parallel.dp * scenario.setup.parallel.most_micro_batches)
    full = StepShape.prefill(together, tokens)
    return float(pipelined_cost(model, scenario.setup, times, full).time_s) / (together * tokens)


def bounds_of(model: ModelSpec, setup: EngineSetup, times: Times) -> Bounds:
    """The share of each bound in the time of steps, as `times` sees it for their shapes."""

    def bounds(shape: StepShape) -> dict[str, Column]:
        shares = pipelined_cost(model, setup, times, shape).shares()
        return {bound: np.broadcast_to(share, np.shape(shape.tokens)) for bound, share in shares.items()}

    return bounds


def usual_limits_said(scenario: Scenario) -> Iterator[str]:
    """Which limits of its engine a scenario leaves to the profile, whose default they then are."""
    engine = scenario.engine
    unnamed = {"max_num_seqs": scenario.seats, "max_batched_tokens": scenario.step_tokens}
    said = [f"engine.{field} {value}" for field, value in unnamed.items() if getattr(engine, field) is None]
    if said:
        yield f"limits that nobody names are those of engine profile '{engine.profile}': {', '.join(said)}"


def static_said(scenario: Scenario) -> Iterator[str]:
    """That batches are static because nothing was said, of an engine that is known to batch otherwise."""
    engine = scenario.engine
    usual = get_profile(engine.profile).batching
    if engine.batching is None and usual is not None and scenario.setup.policy == "static":
        yield (
            "batches are static, each served until its last request has ended, since no technique says otherwise; the "
            f"engine of profile '{engine.profile}' batches continuously: add continuous_batching to techniques, or "
            f"engine.batching: {usual}"
        )


def waited_for_a_seat(requests: Mapping[str, Column], seats: int) -> Column:
    """Of each request whether all seats were taken for a while between its arrival and its first step."""
    begun = np.isfinite(requests["admitted_s"])
    waited = np.zeros(len(begun), dtype=bool)
    if not begun.any():
        return waited
    came_s, begun_s, ended_s = (requests[name][begun] for name in ("arrival_s", "admitted_s", "finished_s"))
    ended_s = ended_s[np.isfinite(ended_s)]
    moments_s = np.concatenate([begun_s, ended_s])
    order = np.argsort(moments_s, kind="stable")
    moments_s, taken = moments_s[order], np.cumsum(np.repeat([1, -1], [len(begun_s), len(ended_s)])[order])
    # Seconds with all seats taken up to each moment: as many before a request begins as before it came mean no wait.
    full_s = np.concatenate([[0.0], np.cumsum(np.diff(moments_s) * (taken[:-1] >= seats))])
    waited[begun] = np.interp(begun_s, moments_s, full_s) > np.interp(came_s, moments_s, full_s)
    return waited


def _seats_said(seats: int, requests: Mapping[str, Column], steps: Mapping[str, Column]) -> Iterator[str]:
    """That requests waited for a seat, where steps had as many sequences as there are seats; else memory was short."""
    if not len(steps["sequences"]) or steps["sequences"].max() < seats:
        return
    if waited := int(waited_for_a_seat(requests, seats).sum()):
        yield f"{waited} request{'s' if waited > 1 else ''} waited for a seat: engine.max_num_seqs is {seats}"


# Of the requests, how many wait at the end of a run whose line grows; and how many times as many as half-way.
_BACKLOG, _GROWN = 0.1, 1.3


def _backlog_said(workload: Workload, requests: Mapping[str, Column]) -> Iterator[str]:
    """That the line grew for as long as requests came, so that the times of a run follow from its length."""
    if isinstance(workload.arrivals, ClosedLoop):
        return
    served = np.isfinite(requests["first_token_s"])
    came_s, first_s = requests["arrival_s"][served], requests["first_token_s"][served]
    if not len(came_s):
        return
    last_s = float(np.max(came_s))
    half_s = (float(np.min(came_s)) + last_s) / 2.0
    at_half, at_end = (int(np.sum((came_s <= moment_s) & (first_s > moment_s))) for moment_s in (half_s, last_s))
    if at_end > _BACKLOG * len(came_s) and at_end > _GROWN * at_half:
        yield (
            f"overloaded: {at_end} of {len(came_s)} requests still waited for their first token when the last one "
            "came, so that times grow with the length of the run"
        )


def run_result(
    scenario: Scenario,
    model: ModelSpec,
    times: Times,
    num_blocks: int,
    recorder: Recorder,
    provenance: Provenance,
    devices: int | None = None,
) -> RunResult:
    """The result of a recorded run on `devices` devices, those of one engine without it, in `num_blocks` blocks each.

    The bounds of its steps are those that `times` sees for their shapes.
    """
    if recorder.rejections:
        id, reason = next(iter(recorder.rejections.items()))
        provenance.notes.append(f"requests were turned away; request {id}, because {reason}")
    recorder.bounds = recorder.bounds or bounds_of(model, scenario.setup, times)
    steps, requests, price = recorder.steps(), recorder.requests(), times.hardware.price_usd_per_h
    if len(requests["arrival_s"]):
        covered = covered_said(scenario.workload.arrivals, float(np.max(requests["arrival_s"])))
        provenance.notes.extend([] if covered is None else [covered])
    provenance.notes.extend(_backlog_said(scenario.workload, requests))
    provenance.notes.extend(static_said(scenario))
    provenance.notes.extend(usual_limits_said(scenario))
    if scenario.cluster is None and scenario.engine.disaggregation is None:
        provenance.notes.extend(_seats_said(scenario.seats, requests, steps))
    summary = summarize(
        requests,
        steps,
        recorder.itl_s,
        slo=scenario.slo,
        duration_s=recorder.end_s,
        idle_s=recorder.idle_s,
        num_blocks=num_blocks,
        block_size=scenario.engine.block_size,
        price_usd_per_h=None if price is None else price * (devices or scenario.setup.parallel.devices),
    )
    tables = requests, steps, recorder.itl_s, recorder.outputs
    return RunResult(scenario, summary, provenance, *tables, None, recorder.acceptance_by_position)
