"""Which techniques compute the same with other kernels? Every engine of today has them; the baseline lacks them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Self

from membound.roofline.parallel import Parallelism
from membound.roofline.techniques.base import Technique
from membound.roofline.techniques.setup import EngineSetup

if TYPE_CHECKING:
    from membound.roofline.hardware import HardwareSpec
    from membound.roofline.models import ModelSpec


class FlashAttention(Technique):
    """Scores stay on the chip instead of going to memory and back (Dao et al., FlashAttention, 2022)."""

    layer = "kernels"
    family = "move less data"
    title = "fused attention"
    baseline = "attention that writes its scores to memory"
    lossless = True
    gain_metric = "output_tokens_per_s"
    usual = True
    meant_by = dict.fromkeys(("flashattention2", "flashattention3", "fa2", "fa3"), "")

    name: Literal["flash_attention"] = "flash_attention"

    def apply(self, setup: EngineSetup) -> EngineSetup:
        return replace(setup, fused_attention=True)

    @classmethod
    def remove(cls, setup: EngineSetup) -> EngineSetup:
        return replace(setup, fused_attention=False)


class MlaAbsorption(Technique):
    """Decode attends to the latents of MLA themselves (DeepSeek-V2, 2024, section 2.1); nothing for other models."""

    layer = "kernels"
    family = "move less data"
    title = "MLA absorption"
    baseline = "keys and values unpacked from the latents in each step"
    lossless = True
    gain_metric = "tpot_s"
    usual = True
    attacks = ("memory_kv",)

    name: Literal["mla_absorption"] = "mla_absorption"

    def apply(self, setup: EngineSetup) -> EngineSetup:
        return replace(setup, absorbed_mla=True)

    @classmethod
    def remove(cls, setup: EngineSetup) -> EngineSetup:
        return replace(setup, absorbed_mla=False)

    @classmethod
    def advised(cls, model: ModelSpec, hardware: HardwareSpec, parallel: Parallelism) -> Self | None:
        return cls() if "mla" in model.mixer_kinds else None
