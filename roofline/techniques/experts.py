"""Which techniques change where the experts of a mixture lie: off the device, or better spread over several?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field

from membound.roofline.errors import MemboundError
from membound.roofline.parallel import Parallelism
from membound.roofline.techniques.base import Technique
from membound.roofline.techniques.setup import EngineSetup, ExpertStorage

if TYPE_CHECKING:
    from membound.roofline.hardware import HardwareSpec
    from membound.roofline.models import ModelSpec


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

    @classmethod
    def advised(cls, model: ModelSpec, hardware: HardwareSpec, parallel: Parallelism) -> Self | None:
        experts = min((mixture.experts for mixture in model.mixtures), default=0)
        return cls(cached_experts=max(1, experts // 2)) if experts else None


class ExpertBalancing(Technique):
    """Experts go to the devices of expert parallelism by their load, with copies of the most loaded ones.

    The slowest device waits for fewer tokens, and each holds and may read more experts. Popularity, the scenario's
    `expert_skew`, is taken to be known; with uniform popularity there is nothing to gain. Source of the technique:
    DeepSeek-V3, 2024, sections 3.4.1 and 3.4.2, and its load balancer EPLB; both prefill (EP 32) and decode (EP 144) of
    its online service have 32 redundant experts (open-infra-index, day 6).
    """

    layer = "schedule"
    family = "compute less per step"
    title = "expert balancing"
    baseline = "experts on devices regardless of their load"
    lossless = True
    gain_metric = "output_tokens_per_s"
    works_by = "the device that the others wait for has fewer tokens, and each holds more experts"
    meant_by = dict.fromkeys(("eplb",), "")

    name: Literal["expert_balancing"] = "expert_balancing"
    redundant_experts: int = Field(
        32, ge=0, le=65536, description="copies of each layer's most loaded experts, over all devices"
    )

    def apply(self, setup: EngineSetup) -> EngineSetup:
        if setup.expert_storage is not None:
            raise MemboundError(
                "expert_balancing copies experts to other devices, where expert_offload keeps none that is not in use; "
                "leave one of them out"
            )
        return replace(setup, redundant_experts=self.redundant_experts)

    @classmethod
    def advised(cls, model: ModelSpec, hardware: HardwareSpec, parallel: Parallelism) -> Self | None:
        experts = min((mixture.experts for mixture in model.mixtures), default=0)
        if not experts or parallel.ep == 1:
            return None
        return cls(redundant_experts=-experts % parallel.ep or parallel.ep)  # as many as fill each device's slots
