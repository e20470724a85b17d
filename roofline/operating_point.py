"""Where does one step stand under the roofs, and what would the next larger batches be bound by?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from membound.roofline.cost import OperatorCost, StepCost, step_cost
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec, get_hardware
from membound.roofline.memory import MemoryBreakdown, memory_breakdown
from membound.roofline.model_files import resolve_model
from membound.roofline.models import ModelSpec
from membound.roofline.scenario import Scenario
from membound.roofline.shape import StepShape
from membound.roofline.techniques import EngineSetup
from membound.roofline.times import Times, times_for

Phase = Literal["decode", "prefill", "verify"]
PHASES: tuple[Phase, ...] = ("decode", "prefill", "verify")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 32768, 131072)


@dataclass(frozen=True)
class OperatingPoint:
    """A step of a model on a device. `context` is the prompt's length in prefill; `gamma` counts drafts in verify."""

    model: ModelSpec
    hardware: HardwareSpec
    setup: EngineSetup
    phase: Phase
    batch: int
    context: int
    gamma: int = 4

    @classmethod
    def of(cls, scenario: Scenario, *, batch: int, context: int, phase: str) -> OperatingPoint:
        """A step of the scenario's model, hardware and techniques.

        Raises MemboundError for an unknown phase, and where the scenario names something unknown.
        """
        known = next((known for known in PHASES if known == phase), None)
        if known is None:
            raise MemboundError(f"phase is '{phase}'; give {', '.join(PHASES)}")
        setup = scenario.setup
        gamma = setup.drafts.gamma if setup.drafts else 4
        model, hardware = resolve_model(scenario.model), get_hardware(scenario.hardware)
        if context > model.max_context:
            raise MemboundError(f"context is {context}, more than the {model.max_context} tokens of '{model.name}'")
        return cls(model, hardware, setup, known, batch, context, gamma)

    @cached_property
    def times(self) -> Times:
        return times_for(self.hardware, self.setup.profile)

    @property
    def shape(self) -> StepShape:
        if self.phase == "prefill":
            return StepShape.prefill(self.batch, self.context)
        drafts = self.gamma if self.phase == "verify" else 0
        return StepShape.verify(self.batch, max(self.context, 1 + drafts), drafts)

    @cached_property
    def cost(self) -> StepCost:
        return step_cost(self.model, self.setup, self.times, self.shape)

    @property
    def calibrated(self) -> bool:
        return self.hardware.calibration is not None

    @property
    def tokens_per_s(self) -> float:
        """Tokens that steps like this one process in a second."""
        return float(self.shape.tokens / self.cost.time_s)

    @property
    def memory(self) -> MemoryBreakdown:
        kv_tokens = float(self.batch * self.context)
        return memory_breakdown(
            self.model, self.setup, kv_tokens, float(self.shape.tokens), self.times.activation_bytes, float(self.batch)
        )

    @property
    def fits(self) -> bool:
        return self.memory.total_bytes <= self.hardware.memory_bytes

    @property
    def free_bytes(self) -> float:
        return max(0.0, self.hardware.memory_bytes - self.memory.total_bytes)

    def bounds(self) -> list[tuple[str, float]]:
        """Each bound with its share of the step's time, the largest first, those without a share left out."""
        shares = {bound: float(share) for bound, share in self.cost.shares().items()}
        return sorted(((b, share) for b, share in shares.items() if share > 0), key=lambda item: -item[1])

    def with_batch(self, batch: int) -> OperatingPoint:
        return replace(self, batch=batch)

    def sweep(self) -> list[SweepPoint]:
        """The same step over all batches, up to the first that does not fit (at least this one)."""
        points = [self.with_batch(batch) for batch in sorted({*BATCHES, self.batch})]
        return [SweepPoint.of(point) for point in points if point.fits or point.batch <= self.batch]

    def next_bound(self) -> tuple[int, str] | None:
        """The first larger batch that fits at which another bound has the largest share."""
        now = self.cost.bottleneck
        for point in self.sweep():
            if point.batch > self.batch and point.bottleneck != now:
                return point.batch, point.bottleneck
        return None

    def breakeven_tokens(self) -> float:
        """Tokens that a verify step must yield for each sequence to be worth its time against plain decoding."""
        plain = replace(self, phase="decode")
        return float(self.cost.time_s / plain.cost.time_s)

    def to_json(self) -> dict[str, Any]:
        """What `membound predict --json` prints of the step: its time, its operators and the memory."""
        cost, memory = self.cost, self.memory
        drafts = self.gamma if self.phase == "verify" else 0
        return {
            "point": {"phase": self.phase, "batch": self.batch, "context": self.context, "drafts": drafts},
            "step": {
                "time_s": float(cost.time_s),
                "low_s": float(cost.low_s),
                "high_s": float(cost.high_s),
                "tokens_per_s": self.tokens_per_s,
                "flops": float(cost.flops),
                "bytes": float(cost.bytes),
                "arithmetic_intensity": float(cost.arithmetic_intensity),
                "bottleneck": cost.bottleneck,
                "bottleneck_share": {bound: float(share) for bound, share in cost.shares().items()},
            },
            "operators": [_operator_json(item, float(cost.time_s)) for item in cost.operators],
            "memory": {
                "weights_bytes": memory.weights_bytes,
                "kv_bytes": memory.kv_bytes,
                "activation_bytes": memory.activation_bytes,
                "total_bytes": memory.total_bytes,
                "device_bytes": self.hardware.memory_bytes,
                "fits": self.fits,
            },
            "hardware": {"name": self.hardware.name, "calibrated": self.calibrated, "source": self.hardware.source},
        }


def _operator_json(item: OperatorCost, step_s: float) -> dict[str, Any]:
    op = item.operator
    return {
        "name": op.name,
        "calls": op.calls,
        "flops": float(op.flops) * op.calls,
        "weight_bytes": float(op.weight_bytes) * op.calls,
        "kv_bytes": float(op.kv_bytes) * op.calls,
        "activation_bytes": float(op.activation_bytes) * op.calls,
        "time_s": float(item.total_s),
        "share": float(item.total_s) / step_s,
        "bound": item.bound,
    }


@dataclass(frozen=True)
class SweepPoint:
    """A step at one batch: seconds with their interval, tokens a second, and the most that the bare roofs allow."""

    batch: int
    time_s: float
    low_s: float
    high_s: float
    tokens_per_s: float
    low_tokens_per_s: float
    high_tokens_per_s: float
    memory_roof_tokens_per_s: float
    compute_roof_tokens_per_s: float
    bottleneck: str

    @classmethod
    def of(cls, point: OperatingPoint) -> SweepPoint:
        cost = point.cost
        tokens = float(point.shape.tokens)
        memory_s = sum(float(op.time.memory_s) * op.operator.calls for op in cost.operators)
        compute_s = sum(float(op.time.compute_s) * op.operator.calls for op in cost.operators)
        return cls(
            batch=point.batch,
            time_s=float(cost.time_s),
            low_s=float(cost.low_s),
            high_s=float(cost.high_s),
            tokens_per_s=point.tokens_per_s,
            low_tokens_per_s=tokens / float(cost.high_s),
            high_tokens_per_s=tokens / float(cost.low_s),
            memory_roof_tokens_per_s=tokens / memory_s,
            compute_roof_tokens_per_s=tokens / compute_s,
            bottleneck=cost.bottleneck,
        )
