"""What is said of an operator's time, and by whom?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from membound.roofline.hardware import HardwareSpec
from membound.roofline.models import ModelSpec
from membound.roofline.operators import Operator
from membound.roofline.shape import Count, StepShape


@dataclass(frozen=True)
class OperatorTime:
    """Seconds of one call, and what the bare roofs alone would ask: the largest of those says what binds."""

    time_s: Count
    memory_s: Count
    compute_s: Count
    overhead_s: Count
    link_s: Count = 0.0


class HasTotal(Protocol):
    """An operator with the seconds of all its calls."""

    @property
    def operator(self) -> Operator: ...

    @property
    def total_s(self) -> Count: ...


class Times(Protocol):
    """Turns operators into seconds on one device."""

    hardware: HardwareSpec
    activation_bytes: float
    relative_error: float

    needs_working_set: bool

    def of(self, operator: Operator, working_set_bytes: float) -> OperatorTime:
        """Seconds of one call where the step as a whole reads `working_set_bytes`."""

    def spread_of(self, operator: Operator) -> float:
        """How far off an operator's time may be, as a share of it."""

    def waiting_s(self, costs: Sequence[HasTotal], model: ModelSpec, shape: StepShape) -> Count | None:
        """Seconds that the device waits for the host beyond the operators' own, None where nothing is known of it."""
