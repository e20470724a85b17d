"""Which techniques decide who shares a step, and what of it runs at the same time?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field

from membound.roofline.parallel import Parallelism
from membound.roofline.techniques.base import Technique
from membound.roofline.techniques.setup import BatchOverlap, EngineSetup

if TYPE_CHECKING:
    from membound.roofline.hardware import HardwareSpec
    from membound.roofline.models import ModelSpec


class ContinuousBatching(Technique):
    """A request joins the batch at any step and leaves it when it ends (Orca, OSDI 2022: iteration-level)."""

    layer = "schedule"
    family = "use a read more than once"
    title = "continuous batching"
    baseline = "static batching"
    lossless = True
    gain_metric = "output_tokens_per_s"
    needs_batch = True
    works_by = "seats that fall free are filled at once"

    name: Literal["continuous_batching"] = "continuous_batching"

    def apply(self, setup: EngineSetup) -> EngineSetup:
        return replace(setup, policy="continuous")


class DualBatchOverlap(Technique):
    """A step's batch is split in two: while one half exchanges messages between devices, the other computes.

    Both halves read the weights, so that it loses where those are most of a step, and needs a batch. The thresholds are
    vLLM's defaults (docs, `dbo_decode_token_threshold` and `dbo_prefill_token_threshold`); 20 units of an H800 that
    communicate: DeepSeek-V3, 2024, section 3.2.2. In decode the network's own engines send (the same, section 3.4.2).
    """

    layer = "schedule"
    family = "wait less"
    title = "dual-batch overlap"
    baseline = "one batch, whose messages nothing hides"
    lossless = True
    gain_metric = "output_tokens_per_s"
    needs_batch = True
    works_by = "half of a batch computes while the other half's messages pass, and both read the weights"
    meant_by = dict.fromkeys(("tbo", "twobatchoverlap", "dbo"), "")

    name: Literal["dual_batch_overlap"] = "dual_batch_overlap"
    decode_tokens: int = Field(32, ge=2, le=10**6, description="tokens a device from which on a decode step is split")
    prefill_tokens: int = Field(512, ge=2, le=10**8, description="the same of steps with prompts")
    communication_units: int = Field(
        20, ge=0, le=10**4, description="units of the device that send instead of computing, in steps with prompts"
    )

    def apply(self, setup: EngineSetup) -> EngineSetup:
        overlap = BatchOverlap(self.decode_tokens, self.prefill_tokens, self.communication_units)
        return replace(setup, overlap=overlap)

    @classmethod
    def advised(cls, model: ModelSpec, hardware: HardwareSpec, parallel: Parallelism) -> Self | None:
        return (
            cls() if parallel.dp > 1 and model.mixtures else None
        )  # engines have it for their experts' exchange alone
