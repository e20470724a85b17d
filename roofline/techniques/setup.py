"""What is an engine, as far as cost and construction are concerned?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from membound.roofline.parallel import SINGLE, Parallelism
from membound.roofline.precision import Precision
from membound.roofline.precision_plan import PrecisionPlan
from membound.roofline.techniques.drafts import Drafts

PolicyName = Literal["static", "continuous"]
PLAIN = PrecisionPlan()


@dataclass(frozen=True)
class EngineSetup:
    """What the techniques of a scenario leave for the engine to be: the one input of cost and of construction."""

    precision: PrecisionPlan = PLAIN
    policy: PolicyName = "static"
    drafts: Drafts | None = None
    parallel: Parallelism = SINGLE
    fused_attention: bool = True
    absorbed_mla: bool = True
    expert_skew: float = 0.0
    profile: str = "graphs"

    @property
    def weights(self) -> Precision:
        """The weight format of the layers."""
        return self.precision.weights

    @property
    def kv(self) -> Precision:
        """The format of the cache of layers without a window."""
        return self.precision.kv
