"""Which parts of a scenario can be predicted but not run yet?"""

from __future__ import annotations

from membound.roofline.models.files import resolve_model
from membound.roofline.scenario import Scenario
from membound.roofline.techniques import EngineSetup
from membound.runtime.kv.build import move_problem, runs_in
from membound.runtime.quantization.recipes import format_problem
from membound.runtime.supported import recurrent


def unmeasured(setup: EngineSetup, *, mxfp4: bool = False) -> str | None:
    """The first part of a set-up that is predicted but does not run here yet, in one sentence; None where all runs.

    `mxfp4` says that the kernels multiply it.
    """
    plan = setup.precision
    if problem := format_problem(plan, mxfp4=mxfp4):
        return problem
    parts = (
        (
            setup.parallel.devices > setup.parallel.tp,
            f"parallelism other than tp and ep on {setup.parallel.devices} devices",
            "tensor and expert parallelism",
        ),
        (not runs_in(plan.kv), f"a KV cache in {plan.kv.name}", "fp8, int8, int4, kivi2, kivi4 and 16 bits"),
        (
            setup.expert_storage is not None and setup.parallel.ep > 1,
            "expert_offload of experts that parallel.ep divides",
            "expert_offload on one device, and on those of parallel.tp",
        ),
        (setup.redundant_experts is not None, "expert_balancing", "experts in the order of the model"),
        (setup.overlap is not None, "dual_batch_overlap", "whole batches"),
        (not setup.fused_attention, "attention that writes its scores to memory", "fused attention"),
    )
    wrong = next((part for part in parts if part[0]), None)
    return None if wrong is None else f"{wrong[1]} is predicted, not measured yet: the runtime has {wrong[2]}"


def unmeasured_scenario(scenario: Scenario) -> str | None:
    """The first part of a scenario around its engine that does not run here, in one sentence, or None."""
    if scenario.cluster is not None:
        return "field 'cluster' is predicted, not measured yet: the runtime has one engine; remove it"
    return _taken_back(scenario) or _handed_over(scenario)


def _taken_back(scenario: Scenario) -> str | None:
    """What takes tokens back or takes them elsewhere, which a state that has merged them all does not allow.

    Chains of drafts that are looked up or that another model writes are taken back: see `rollback`.
    """
    drafts = scenario.setup.drafts
    parts = (
        (
            drafts is not None and not drafts.apart,
            f"{drafts and drafts.kind} drafts are trees, or read what the model computes",
            "take ngram_speculation or draft_model_speculation",
        ),
        (scenario.engine.prefix_caching, "engine.prefix_caching continues from any block", "set it to false"),
        (scenario.engine.preemption == "swap", "engine.preemption 'swap' moves blocks", "set it to 'recompute'"),
        (scenario.engine.disaggregation is not None, "engine.disaggregation moves blocks", "remove it"),
    )
    wrong = next((part for part in parts if part[0]), None)
    if wrong is None or not recurrent(resolve_model(scenario.model)):
        return None
    return (
        f"model '{scenario.model}' keeps a recurrent state, into which all tokens are merged, "
        f"and {wrong[1]}: {wrong[2]}"
    )


def _handed_over(scenario: Scenario) -> str | None:
    """What two processes, of which one computes prompts and hands K and V over, do not do."""
    settings, drafts = scenario.engine.disaggregation, scenario.setup.drafts
    if settings is None:
        return None
    if settings.prefill_engines != 1 or settings.decode_engines != 1:
        return (
            f"engine.disaggregation has {settings.prefill_engines} prefill and {settings.decode_engines} decode "
            "engines, which are predicted, not measured yet: the runtime has one of each"
        )
    if settings.prefill_parallel or settings.decode_parallel:
        return (
            "engine.disaggregation gives pools a parallelism of their own, which is predicted, not measured yet; leave "
            "prefill_parallel and decode_parallel out"
        )
    if drafts is not None and drafts.kind != "ngram":
        return (
            f"engine.disaggregation does not go with speculation by {drafts.kind}, whose drafter has not read the "
            "prompt where the output is written; take ngram_speculation, or leave one of them out"
        )
    return move_problem(scenario.setup, scenario.engine, resolve_model(scenario.model))
