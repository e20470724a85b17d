"""Which techniques decide who shares a step?"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from membound.roofline.techniques.base import Technique
from membound.roofline.techniques.setup import EngineSetup


class ContinuousBatching(Technique):
    """A request joins the batch at any step and leaves it when it ends (Orca, OSDI 2022: iteration-level)."""

    layer = "schedule"
    family = "use a read more than once"
    title = "continuous batching"
    baseline = "static batching"
    lossless = True
    gain_metric = "output_tokens_per_s"

    name: Literal["continuous_batching"] = "continuous_batching"

    def apply(self, setup: EngineSetup) -> EngineSetup:
        return replace(setup, policy="continuous")

    def needs_batch(self) -> bool:
        return True
