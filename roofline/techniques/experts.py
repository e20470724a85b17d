"""Which technique keeps the experts of a mixture elsewhere than on the device?"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from membound.roofline.techniques.base import Technique
from membound.roofline.techniques.setup import EngineSetup, ExpertStorage


class ExpertOffload(Technique):
    """Routed experts lie in the host's memory or on its disk; the device keeps those of each layer that it used last.

    A step waits for the chosen experts that are not there. The predicted cost counts none of that wait as hidden:
    `prefetch`, which asks the next layer's router ahead of time, hides what computing takes at best. Source of the
    technique: Eliseev and Mazur, Fast Inference of Mixture-of-Experts Language Models with Offloading, 2023.
    """

    layer = "weights"
    family = "compute less per step"
    title = "expert offload"
    baseline = "all experts in the device's memory"
    lossless = True
    gain_metric = "tpot_s"

    name: Literal["expert_offload"] = "expert_offload"
    cached_experts: int = Field(4, ge=1, le=65536, description="routed experts of each layer that the device keeps")
    place: Literal["host", "disk"] = Field("host", description="where all of them lie")
    prefetch: bool = Field(True, description="fetch what the next layer's router would choose")
    gb_per_s: float | None = Field(
        None,
        gt=0,
        le=10000,
        description="10^9 bytes a second that come from there; without, what the device's link to its host has, half "
        "of a CPU's memory bandwidth, because a copy reads and writes, or 2 from a disk",
    )

    def apply(self, setup: EngineSetup) -> EngineSetup:
        storage = ExpertStorage(self.cached_experts, self.place, self.prefetch, self.gb_per_s)
        return replace(setup, expert_storage=storage)
