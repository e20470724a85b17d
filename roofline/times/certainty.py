"""How far may the time of a step be off, and on whose measurements does it rest?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from membound.roofline.cost import step_cost
from membound.roofline.models import ModelSpec
from membound.roofline.shape import StepShape
from membound.roofline.techniques import EngineSetup
from membound.roofline.times.operator import Times
from membound.roofline.times.origin import Origin, origin_of


@dataclass(frozen=True)
class Certainty:
    """The origin of a step's times on a device, and their relative interval."""

    device: str
    origin: Origin
    relative_error: float

    @classmethod
    def of(cls, model: ModelSpec, setup: EngineSetup, times: Times, shape: StepShape) -> Certainty:
        cost = step_cost(model, setup, times, shape)
        origin = origin_of(times, cost.operators, float(cost.time_s))
        return cls(times.hardware.name, origin, float(cost.relative_error))

    @property
    def said(self) -> str:
        scopes = ", ".join(
            "its other kernels" if scope == self.device else scope for scope in self.origin.inherited_from
        )
        share = f"{self.origin.measured_share:.0%}"
        rests = {
            "calibrated": "from this machine's calibration",
            "measured": f"from kernels measured on {self.device}",
            "partly": f"{share} from kernels measured on {self.device}, the rest inherited from {scopes}",
            "inherited": f"no kernel was measured on {self.device}, all are inherited from {scopes}",
        }[self.origin.kind]
        return f"times of steps are within ±{self.relative_error:.0%}: {rests}"

    def to_json(self) -> dict[str, Any]:
        origin = self.origin
        return {
            "kind": origin.kind,
            "measured_share": origin.measured_share,
            "inherited_from": list(origin.inherited_from),
            "relative_error": self.relative_error,
        }
