"""What is the time of an operator made of, and what must a source of times provide?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from membound.roofline.hardware import HardwareSpec
from membound.roofline.hardware.links import host_copies_bytes_per_s
from membound.roofline.models import ModelSpec
from membound.roofline.operators import Operator
from membound.roofline.shape import Count, StepShape

# A solid-state disk at PCIe 3.0 x4 that reads megabytes here and there; from memory. A field of the technique's stands
# before it.
DISK_BYTES_PER_S = 2e9


@dataclass(frozen=True)
class OperatorTime:
    """Seconds of one call, and what the bare roofs alone would ask: the largest of those says what binds."""

    time_s: Count
    memory_s: Count
    compute_s: Count
    overhead_s: Count
    link_s: Count = 0.0

    def repeated(self, times: Count) -> OperatorTime:
        """Of so many such calls, one after the other."""
        return OperatorTime(
            self.time_s * times,
            self.memory_s * times,
            self.compute_s * times,
            self.overhead_s * times,
            self.link_s * times,
        )

    def slowed(self, share: Count) -> OperatorTime:
        """With arithmetic that takes this share longer."""
        longer = self.compute_s * share
        return replace(self, time_s=self.time_s + longer, compute_s=self.compute_s + longer)


class HasTotal(Protocol):
    """An operator with the seconds of all its calls."""

    @property
    def operator(self) -> Operator: ...

    @property
    def total_s(self) -> Count: ...


def expert_moves_s(operator: Operator, hardware: HardwareSpec) -> OperatorTime:
    """The time of experts that come from the host over its link, or from the disk."""
    moves = operator.moves
    assert moves is not None, "experts come from somewhere"
    rate = moves.bytes_per_s or _place_bytes_per_s(moves.place, hardware)
    link_s = operator.link_bytes / rate
    return OperatorTime(link_s, 0.0, 0.0, 0.0, link_s)


def _place_bytes_per_s(place: str, hardware: HardwareSpec) -> float:
    if place == "disk":
        return DISK_BYTES_PER_S
    if hardware.host is not None:
        return host_copies_bytes_per_s(hardware.host)
    return hardware.bandwidth_bytes_per_s / 2  # a copy within one memory reads and writes


class MadeOf(ABC):
    """Equal where the very same objects made it, which it keeps: of those there is one time of anything."""

    @property
    @abstractmethod
    def _made_of(self) -> tuple[object, ...]: ...

    @property
    def _ids(self) -> tuple[int, ...]:
        return tuple(map(id, self._made_of))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MadeOf) and type(other) is type(self) and self._ids == other._ids

    def __hash__(self) -> int:
        return hash(self._ids)


class Times(Protocol):
    """Turns operators into seconds on one device."""

    hardware: HardwareSpec
    activation_bytes: float
    relative_error: float

    needs_working_set: bool

    def __hash__(self) -> int:
        """Equal ones give the same times: the cost of a step is kept by them."""

    def of(self, operator: Operator, working_set_bytes: float) -> OperatorTime:
        """Seconds of one call where the step as a whole reads `working_set_bytes`."""

    def spread_of(self, operator: Operator) -> float:
        """How far off an operator's time may be, as a share of it."""

    def waiting_s(self, costs: Sequence[HasTotal], model: ModelSpec, shape: StepShape) -> Count | None:
        """Seconds that the device waits for the host beyond the operators' own, None where nothing is known of it.

        The shape is that of one data-parallel rank.
        """
