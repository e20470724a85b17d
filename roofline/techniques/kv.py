"""Which techniques make the cache smaller, or read less of it?"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field, field_validator, model_validator

from membound.roofline.errors import MemboundError
from membound.roofline.part import MAX_TOKENS
from membound.roofline.precision import Precision, get_precision
from membound.roofline.precision.names import parse_precision
from membound.roofline.techniques.base import Technique
from membound.roofline.techniques.setup import EngineSetup, EvictionPolicy, KvBudget

# What each policy's authors keep whatever happens. StreamingLLM: 4 first tokens (Xiao et al., ICLR 2024, section 3.2);
# H2O: half of the budget are the newest (Zhang et al., NeurIPS 2023, section 5); SnapKV: a window of the prompt's last
# 32 tokens observes (Li et al., NeurIPS 2024, section 5); Quest: pages of 16 (Tang et al., ICML 2024, section 4). All
# from memory.
USUAL_SINKS, USUAL_OBSERVED, USUAL_PAGE = 4, 32, 16


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


class KvEviction(Technique):
    """Decode attends to `budget` tokens of each sequence at most: the others are evicted, or (Quest) not read.

    `streaming` keeps the first `sinks` tokens and the newest; `h2o` those that received most attention and the `recent`
    ones; `snapkv` those to which the last `recent` tokens of the prompt pay most attention, pooled with their
    neighbours; `quest` keeps all tokens, and chooses pages of `page` tokens by the least and the largest of their keys.
    What each KV head keeps is its own. A question that comes after its context was evicted may not find its answer.
    """

    layer = "kv"
    family = "move less data"
    title = "KV cache eviction"
    baseline = "all tokens cached and read"
    lossless = False
    gain_metric = "tpot_s"

    name: Literal["kv_eviction"] = "kv_eviction"
    policy: EvictionPolicy = Field("snapkv", description="streaming, h2o, snapkv or quest")
    budget: int = Field(1024, ge=2, le=MAX_TOKENS, description="tokens of a sequence that a step of decode reads")
    sinks: int | None = Field(None, ge=0, le=MAX_TOKENS, description="first tokens that stay (streaming)")
    recent: int | None = Field(None, ge=1, le=MAX_TOKENS, description="last tokens that stay (h2o, snapkv)")
    page: int | None = Field(None, ge=1, le=256, description="tokens that are chosen together (quest)")

    @model_validator(mode="after")
    def _options_are_of_the_policy(self) -> KvEviction:
        belongs = {"sinks": ("streaming",), "recent": ("h2o", "snapkv"), "page": ("quest",)}
        for field, policies in belongs.items():
            if getattr(self, field) is not None and self.policy not in policies:
                raise ValueError(
                    f"{field} is {getattr(self, field)}, which {self.policy} does not have; it belongs to "
                    f"{' and '.join(policies)}"
                )
        kept = self._kept()
        if kept.sinks + kept.recent >= self.budget:
            field = "sinks" if kept.sinks else "recent"
            raise ValueError(
                f"budget is {self.budget}, and {kept.sinks + kept.recent} tokens stay whatever happens; "
                f"make it larger, or {field} smaller"
            )
        if self.budget < 2 * kept.page and self.policy == "quest":
            raise ValueError(f"budget is {self.budget}, less than two pages of {kept.page} tokens; make it larger")
        return self

    def _kept(self) -> KvBudget:
        match self.policy:
            case "streaming":
                sinks = self.sinks if self.sinks is not None else min(USUAL_SINKS, self.budget - 1)
                return KvBudget("streaming", self.budget, sinks=sinks)
            case "h2o":
                return KvBudget("h2o", self.budget, recent=self.recent or self.budget // 2)
            case "snapkv":
                return KvBudget("snapkv", self.budget, recent=self.recent or min(USUAL_OBSERVED, self.budget // 2))
            case _:
                return KvBudget("quest", self.budget, page=self.page or USUAL_PAGE)

    def apply(self, setup: EngineSetup) -> EngineSetup:
        kept = self._kept()
        if kept.evicts and setup.drafts is not None:
            raise MemboundError(
                f"kv_eviction by {self.policy} excludes speculation, because a rejected draft may have evicted a token "
                "that is needed again; take the policy quest, or leave one out"
            )
        return replace(setup, kv_budget=kept)


def _cache_format(name: str) -> Precision:
    return parse_precision(name, "kv") or get_precision(name)
