"""What do the operators of one step share: the model and its formats, and the tokens of a device and of its peers?"""

from __future__ import annotations

from copy import copy
from typing import Self

from membound.roofline.models import ModelSpec
from membound.roofline.operators import Operator, elementwise, linear, message
from membound.roofline.precision.plan import PrecisionPlan
from membound.roofline.shape import Count, StepShape
from membound.roofline.techniques import EngineSetup


class StepContext:
    """One device's part of a step, `width` bytes an activation, with what several kinds of layers are made of."""

    def __init__(self, model: ModelSpec, setup: EngineSetup, shape: StepShape, width: float) -> None:
        self.model, self.setup, self.width = model, setup, width
        self.parallel, self.plan = setup.parallel, setup.precision
        self.shape = shape.on_one_of(self.parallel.dp)
        self.tokens = _rows(self.shape, self.parallel.cp)  # of this device, those of the prompts that it shares divided
        self.all_tokens = _rows(shape, self.parallel.cp)  # of it and its data-parallel peers

    def with_plan(self, plan: PrecisionPlan) -> Self:
        """The same step of layers in other formats."""
        if plan == self.plan:
            return self
        other = copy(self)
        other.plan = plan
        return other

    def linear(self, name: str, calls: int, m: Count, n: int, k: int, part: str) -> Operator:
        """x [m, k] times a matrix [n, k] in the formats that the plan has for this part of the model."""
        plan = self.plan
        return linear(name, calls, m, n, k, plan.weights_of(part), self.width, plan.activations_of(part))

    def after_divided(self, prefix: str, part: str, count: int, inputs: int) -> list[Operator]:
        """The messages about a matrix of whose `inputs` each device of tp has some: its products are summed, or, where
        the division is exact, its inputs and then its products gathered."""
        tp, each = self.parallel.tp, self.tokens * self.width
        if not self.parallel.exact:
            return [message(f"{prefix}reduce_{part}", count, "allreduce", each * self.model.hidden, tp)]
        return [
            message(f"{prefix}gather_{part}_inputs", count, "allgather", each * inputs, tp),
            message(f"{prefix}gather_{part}", count, "allgather", each * self.model.hidden, tp),
        ]

    def activation(self, name: str, count: int, t: Count, n: int, *, gated: bool) -> Operator:
        """The activation between two matrices, of `n` columns, half of which are a gate's where it is `gated`."""
        out = n // 2 if gated else n
        return elementwise(name, "silu_mul", count, t * out, (3 if gated else 2) * t * out * self.width)


def _rows(shape: StepShape, cp: int) -> Count:
    """Tokens that pass the linears of one device of context parallelism: its part of prompts, all that decode."""
    return shape.tokens if cp == 1 else shape.tokens - shape.prefill_tokens * (1.0 - 1.0 / cp)
