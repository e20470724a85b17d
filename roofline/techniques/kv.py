"""Which techniques make the cache smaller?"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field, field_validator

from membound.roofline.errors import MemboundError
from membound.roofline.precision import Precision, get_precision
from membound.roofline.precision_names import parse_precision
from membound.roofline.techniques.base import Technique
from membound.roofline.techniques.setup import EngineSetup


class KvQuantization(Technique):
    """Keys and values in fewer bits: less to read in each step, and room for more sequences."""

    layer = "kv"
    family = "move fewer bytes"
    title = "KV cache quantization"
    baseline = "bf16 KV cache"
    lossless = False
    gain_metric = "tpot_s"

    name: Literal["kv_quantization"] = "kv_quantization"
    format: str = Field("fp8", description="fp8, int8, int4, kivi2, kivi4, q8_0, q4_0, nvfp4 and others")

    @field_validator("format")
    @classmethod
    def _is_of_a_cache(cls, name: str) -> str:
        format = _cache_format(name)
        if format.width >= 16:
            raise ValueError("no quantization has 16 bits or more; give one such as fp8, int8, int4 or kivi2")
        if format.sparse or any(scale.rows > 1 for scale in format.scales):
            raise ValueError("a cache grows by vectors, which this format cannot; give one such as fp8, int8 or kivi2")
        return name

    def apply(self, setup: EngineSetup) -> EngineSetup:
        plan = setup.precision
        if plan.kv.width < 16:
            raise MemboundError(f"the KV cache is {plan.kv.name} already; give one technique that quantizes it")
        return replace(setup, precision=replace(plan, kv=_cache_format(self.format)))


def _cache_format(name: str) -> Precision:
    return parse_precision(name, "kv") or get_precision(name)
