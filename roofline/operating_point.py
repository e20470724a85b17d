"""Where does one step of a scenario stand under the roofs, and what does the deployment hold in memory?"""

from __future__ import annotations

from typing import Any

from membound.roofline.cost import StepCost, step_cost
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.model_files import resolve_model
from membound.roofline.operators import memory_breakdown
from membound.roofline.scenario import Scenario
from membound.roofline.shape import StepShape
from membound.roofline.times import times_for


def step_shape(phase: str, batch: int, context: int, drafts: int = 0) -> StepShape:
    """The shape of a decode step (with `drafts` guesses a sequence to verify) or of a prefill of whole prompts.

    Raises MemboundError for another phase.
    """
    if phase == "decode":
        return StepShape.verify(batch, max(context, 1 + drafts), drafts)
    if phase == "prefill":
        return StepShape.prefill(batch, context)
    raise MemboundError(f"phase is '{phase}'; give decode or prefill")


def operating_point(scenario: Scenario, *, batch: int, context: int, phase: str) -> dict[str, Any]:
    """What `membound predict --json` prints: the step's time with its interval, its operators and the memory.

    A decode step carries the drafts that the scenario's speculation would verify. Raises MemboundError.
    """
    model, hardware = resolve_model(scenario.model), get_hardware(scenario.hardware)
    times, setup = times_for(hardware), scenario.setup
    drafts = setup.drafts.gamma if setup.drafts and phase == "decode" else 0
    cost = step_cost(model, setup, times, step_shape(phase, batch, context, drafts))
    memory = memory_breakdown(model, setup, batch * context, batch * (context if phase == "prefill" else 1 + drafts))
    return {
        "scenario": scenario.model_dump(mode="json"),
        "point": {"phase": phase, "batch": batch, "context": context, "drafts": drafts},
        "step": _step(cost),
        "operators": [_operator(cost, index) for index in range(len(cost.operators))],
        "memory": {
            "weights_bytes": memory.weights_bytes,
            "kv_bytes": memory.kv_bytes,
            "activation_bytes": memory.activation_bytes,
            "total_bytes": memory.total_bytes,
            "device_bytes": hardware.memory_bytes,
            "fits": memory.total_bytes <= hardware.memory_bytes,
        },
        "hardware": {"name": hardware.name, "calibrated": hardware.calibration is not None, "source": hardware.source},
    }


def _step(cost: StepCost) -> dict[str, Any]:
    return {
        "time_s": float(cost.time_s),
        "low_s": float(cost.low_s),
        "high_s": float(cost.high_s),
        "flops": float(cost.flops),
        "bytes": float(cost.bytes),
        "arithmetic_intensity": float(cost.arithmetic_intensity),
        "bottleneck": cost.bottleneck,
        "bottleneck_share": {bound: float(share) for bound, share in cost.shares().items()},
    }


def _operator(cost: StepCost, index: int) -> dict[str, Any]:
    item = cost.operators[index]
    op = item.operator
    return {
        "name": op.name,
        "calls": op.calls,
        "flops": float(op.flops) * op.calls,
        "weight_bytes": float(op.weight_bytes) * op.calls,
        "kv_bytes": float(op.kv_bytes) * op.calls,
        "activation_bytes": float(op.activation_bytes) * op.calls,
        "time_s": float(item.total_s),
        "share": float(item.total_s / cost.time_s),
        "bound": item.bound,
    }
