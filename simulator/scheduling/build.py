"""Which scheduler and how much KV memory does a scenario ask for, and what does its record come to?"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

from membound.roofline.cost import step_cost
from membound.roofline.errors import MemboundError
from membound.roofline.metrics import summarize
from membound.roofline.models import ModelSpec
from membound.roofline.operators import weights_bytes
from membound.roofline.result import BOUNDS, Provenance, RunResult
from membound.roofline.scenario import Scenario
from membound.roofline.shape import StepShape
from membound.roofline.tasks import found_of
from membound.roofline.techniques import NgramDrafts
from membound.roofline.times import Times
from membound.roofline.workload import Workload
from membound.simulator.scheduling.blocks import BlockPool
from membound.simulator.scheduling.drafter import Drafter, ModelledDrafter, NgramDrafter
from membound.simulator.scheduling.policy import POLICIES
from membound.simulator.scheduling.recorder import Recorder
from membound.simulator.scheduling.request import Request
from membound.simulator.scheduling.scheduler import Scheduler

# vLLM's default of gpu_memory_utilization: the rest is for activations and for what else runs there.
MEMORY_SHARE = 0.9


def num_blocks(scenario: Scenario, model: ModelSpec, memory_bytes: float, requests: Items[Request]) -> int:
    """KV blocks of the engine: as given, else what memory holds beside the weights, but no more than can be used.

    Raises MemboundError where the weights leave no room for a single block, or not for as many as given.
    """
    engine = scenario.engine
    block_bytes = model.kv_bytes_per_token(scenario.setup.kv.bits) * engine.block_size
    held = weights_bytes(model, scenario.setup)
    fitting = int((memory_bytes * MEMORY_SHARE - held) // block_bytes)
    if fitting < 1:
        raise MemboundError(
            f"model '{model.name}' does not fit: its weights take {held / 2**30:.1f} GiB of the "
            f"{memory_bytes * MEMORY_SHARE / 2**30:.1f} GiB usable on '{scenario.hardware}'"
        )
    if engine.num_blocks is not None:
        if engine.num_blocks > fitting:
            raise MemboundError(
                f"field 'engine.num_blocks' is {engine.num_blocks}, but '{scenario.hardware}' holds at most {fitting} "
                f"blocks of {engine.block_size} tokens beside the weights of '{model.name}'"
            )
        return engine.num_blocks
    longest = max(turn.tokens for request in requests for turn in request.turns())
    useful = engine.max_num_seqs * (-(-longest // engine.block_size))
    return min(fitting, useful)


def build_scheduler(scenario: Scenario, blocks: int, content_known: bool) -> Scheduler:
    """The scheduler that the scenario's techniques ask for, over `blocks` KV blocks."""
    setup, engine = scenario.setup, scenario.engine
    drafter: Drafter | None = None
    if setup.drafts is not None:
        drafter = NgramDrafter(setup.drafts) if content_known else _modelled_drafter(scenario.workload, setup.drafts)
    pool = BlockPool(blocks, engine.block_size)
    return Scheduler(POLICIES[setup.policy](), pool, engine.max_num_seqs, engine.max_batched_tokens, drafter)


def _modelled_drafter(workload: Workload, drafts: NgramDrafts) -> ModelledDrafter:
    """Finds a draft as often as in the workload's task, else as often as the technique says."""
    found = found_of(workload, "ngram")
    return ModelledDrafter(drafts if found is None else replace(drafts, hit_rate=found), workload.seed)


def run_result(
    scenario: Scenario, model: ModelSpec, times: Times, blocks: int, recorder: Recorder, provenance: Provenance
) -> RunResult:
    """The result of a recorded run; the bounds of its steps are those that `times` sees for their shapes."""
    steps = recorder.steps()
    if recorder.plans:
        shape = StepShape(**{name: steps[name] for name in StepShape.__dataclass_fields__})
        shares = step_cost(model, scenario.setup, times, shape).shares()
        steps |= {bound: share + 0.0 * steps["time_s"] for bound, share in shares.items()}
    else:
        steps |= dict.fromkeys(BOUNDS, steps["time_s"])
    requests, itl_s = recorder.requests(), recorder.itl_s()
    summary = summarize(
        requests,
        steps,
        itl_s,
        slo=scenario.slo,
        duration_s=recorder.end_s,
        idle_s=recorder.idle_s,
        num_blocks=blocks,
        power_w=None,
        price_usd_per_h=times.hardware.price_usd_per_h,
    )
    return RunResult(scenario, summary, provenance, requests, steps, itl_s, recorder.outputs)
