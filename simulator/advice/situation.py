"""Where does an engine stand under its load, in the terms of the decision guide?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec
from membound.roofline.memory import kv_bytes
from membound.roofline.operators import Operator
from membound.roofline.precision import PRECISIONS
from membound.roofline.precision.plan import compute_dtype
from membound.roofline.scenario import Scenario
from membound.roofline.scenario.workload import SessionPrompts
from membound.roofline.shape import StepShape
from membound.roofline.speculation.draft_choice import best_size, served_sizes
from membound.roofline.techniques import Eagle, NgramSpeculation, Speculative, WeightQuantization
from membound.simulator.advice.rules import DraftingOdds, Situation
from membound.simulator.deployment import SpeculatingDeployment, deployment_of
from membound.simulator.load import Load
from membound.simulator.steady import Steady

# Tokens of a step among which the ridge is looked for: a mixture of 256 experts has it at some ten thousand.
_MOST_RIDGE, _RIDGE_NODES = 2.0**24, 24 * 16 + 1


def situation_of(scenario: Scenario, deployment: SpeculatingDeployment, load: Load) -> Situation:
    """The operating point in the terms of the rules."""
    steady = Steady(deployment, load)
    lengths = load.lengths
    whole = lengths.prompt_tokens + lengths.output_tokens
    fits = deployment.largest_batch(whole) >= 1.0
    decode_s = deployment.decode_s(steady.batch, lengths.context)
    strict = scenario.slo.tpot_s is not None and decode_s <= scenario.slo.tpot_s < steady.tpot_s
    return Situation(
        batch=steady.batch,
        seconds=roof_seconds(deployment, steady.batch, lengths.context),
        bottleneck=steady.bottleneck,
        fits=fits,
        fits_in_4_bits=_fits_in_4_bits(scenario, deployment, whole),
        overload_rps=load.overload_rps,
        queued=max(0.0, load.concurrency - steady.batch),
        limited_by_cache=deployment.largest_batch(lengths.context) <= steady.batch + 1.0,
        ridge_tokens=ridge_tokens(deployment, steady.batch),
        params=float(deployment.model.params),
        devices=scenario.parallel.devices,
        prompts_per_output=lengths.prompt_tokens / max(lengths.output_tokens, 1.0),
        prompt_share=steady.prompt_share,
        tpot_slo_is_strict=strict,
        link_keeps_up=_link_keeps_up(deployment, lengths.prompt_tokens),
        reuses_cache=isinstance(scenario.workload.prompts, SessionPrompts),
        has_experts=bool(deployment.model.mixtures),
        drafting=tuple(_drafting(scenario, deployment, steady.batch, lengths.context)),
    )


def roof_seconds(deployment: SpeculatingDeployment, batch: float, context: float) -> dict[str, float]:
    """t_w, t_kv, t_c and t_n of a decode step of plain tokens: its amounts over the roofs of the data sheet, or over
    those that this machine's calibration measured, and nothing else."""
    plain, hardware = replace(deployment, speculation=None), deployment.hardware
    link = hardware.scale_up or hardware.scale_out or hardware.host
    bandwidth = _bandwidth(hardware)
    seconds = dict.fromkeys(("memory_weights", "memory_kv", "compute", "link"), 0.0)
    for op in (cost.operator for cost in plain.verify_cost(batch, context).operators):
        reads = "memory_kv" if op.kind in ("attention", "recurrent") else "memory_weights"
        seconds[reads] += float(op.weight_bytes + op.kv_bytes) / bandwidth * op.calls
        seconds["compute"] += float(op.flops) / _matrix_rate(op, hardware) * op.calls
        seconds["link"] += float(op.link_bytes) / link.bandwidth_bytes_per_s * op.calls if link else 0.0
    return seconds


def _bandwidth(hardware: HardwareSpec) -> float:
    return hardware.calibration.memory_bandwidth if hardware.calibration else hardware.bandwidth_bytes_per_s


def _matrix_rate(op: Operator, hardware: HardwareSpec) -> float:
    """FLOPs a second of the matrix unit in the format that an operator multiplies in; 16 bits where it names none."""
    wide = PRECISIONS["bf16"]
    if hardware.calibration is not None:
        return hardware.calibration.matrix_flops((op.precision or wide).name)
    return compute_dtype(op.precision or wide, op.activations or wide, hardware).flops_per_s


def ridge_tokens(deployment: SpeculatingDeployment, batch: float) -> float:
    """Tokens of a step at which arithmetic on weights takes as long as reading them, in the formats of this set-up.

    Of a dense model it is b / 16 of the ridge of 16-bit weights with b bits, times what its arithmetic is faster. A
    mixture reads more experts as tokens come, and each expert multiplies its share of them alone. `batch` decides the
    micro-batches of a pipeline.
    """
    plain, hardware = replace(deployment, speculation=None), deployment.hardware
    bandwidth = _bandwidth(hardware)
    tokens = np.geomspace(1.0, _MOST_RIDGE, _RIDGE_NODES)
    over = np.zeros_like(tokens)  # seconds by which arithmetic takes longer
    for op in (cost.operator for cost in plain.step(StepShape.decode(tokens, 1.0)).operators):
        if op.kind in ("linear", "moe"):
            over += (op.flops / _matrix_rate(op, hardware) - op.weight_bytes / bandwidth) * op.calls
    at = int(np.argmax(over >= 0)) if over[-1] >= 0 else len(tokens) - 1
    micro = batch / float(deployment.decode_shape(batch, 1.0).sequences)
    return micro * float(np.interp(0.0, over[max(at - 1, 0) : at + 1], tokens[max(at - 1, 0) : at + 1]))


def _fits_in_4_bits(scenario: Scenario, deployment: SpeculatingDeployment, tokens: float) -> bool:
    narrow = tuple(t for t in scenario.techniques if t.layer != "weights" and t.layer != "steps")
    smallest = (*narrow, WeightQuantization(format="int4"))
    setup = scenario.with_techniques(smallest).setup
    return replace(deployment, setup=setup, speculation=None).largest_batch(tokens) >= 1.0


def _link_keeps_up(deployment: SpeculatingDeployment, prompt_tokens: float) -> bool:
    """Whether the link between nodes carries a prompt's cache in the time that another prompt takes to compute."""
    link = deployment.hardware.scale_out
    if link is None:
        return False
    cache = float(kv_bytes(deployment.model, deployment.setup, prompt_tokens))
    return cache / link.bandwidth_bytes_per_s <= deployment.prefill_s(1.0, prompt_tokens)


def _drafting(
    scenario: Scenario, deployment: SpeculatingDeployment, batch: float, context: float
) -> Iterator[DraftingOdds]:
    """The speculation of the scenario, else that by prompt lookup and EAGLE."""
    has = [technique for technique in scenario.techniques if technique.layer == "steps"]
    for technique in has or [NgramSpeculation(), Eagle()]:
        kept = tuple(other for other in scenario.techniques if other.layer != "steps")
        try:
            tried = deployment_of(scenario.with_techniques((*kept, technique)), deployment.model, deployment.hardware)
        except MemboundError:
            continue
        if tried.speculation is None:
            continue
        shape = tried.decode_shape(batch, context)
        if isinstance(technique, Speculative) and technique.is_open:
            sizes = served_sizes(technique, tried.setup.profile)
            best = best_size(tried.speculation, tried.times, shape, sizes).size
            if best is not None:
                tried = replace(tried, speculation=tried.speculation.with_size(best))
        assert tried.speculation is not None
        cost = float(tried.speculation.cost_ratio(tried.times, shape))
        alpha = tried.speculation.acceptance_by_depth[0]
        yield DraftingOdds(technique.name, tried.speculation.verified_tokens, alpha, cost)
