"""Which techniques make the cache smaller, or read less of it?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, field_validator, model_validator

from membound.roofline.errors import MemboundError
from membound.roofline.parallel import Parallelism
from membound.roofline.part import MAX_TOKENS
from membound.roofline.precision import Precision, get_precision
from membound.roofline.precision.names import parse_precision
from membound.roofline.techniques.base import Technique
from membound.roofline.techniques.quality import LONG_CONTEXT, Quality, of_width, perplexity, points
from membound.roofline.techniques.setup import EngineSetup, EvictionPolicy, KvBudget

if TYPE_CHECKING:
    from membound.roofline.hardware import HardwareSpec
    from membound.roofline.models import ModelSpec

# What each policy's authors keep whatever happens. StreamingLLM: 4 first tokens (Xiao et al., ICLR 2024, section 3.2);
# H2O: half of the budget are the newest (Zhang et al., NeurIPS 2023, section 5); SnapKV: a window of the prompt's last
# 32 tokens observes (Li et al., NeurIPS 2024, section 5); Quest: pages of 16 (Tang et al., ICML 2024, section 4). All
# from memory.
USUAL_SINKS, USUAL_OBSERVED, USUAL_PAGE = 4, 32, 16

_KIVI, _KIVI_SOURCE = "Mistral-7B-Instruct-v0.2, KIVI", "jy-yuan/KIVI docs/long_bench.md, table 2"
_KIVI4_QUALITY = points(2, 43.54, 43.53, f"LongBench average 43.54 to 43.53 ({_KIVI} with 4 bits)", _KIVI_SOURCE)
_QUALITY_BY_BITS = {
    8: perplexity(1, 10.2, 10.3, "10.2 to 10.3 (SmolLM2-135M, fp8)", LONG_CONTEXT),
    4: perplexity(2, 10.2, 12.1, "10.2 to 12.1 (SmolLM2-135M, int4)", LONG_CONTEXT),
    2: points(3, 43.54, 42.43, f"LongBench average 43.54 to 42.43 ({_KIVI} with 2 bits)", _KIVI_SOURCE),
}
_QUALITY_OF_QUEST = perplexity(2, 15.1, 15.7, "15.1 to 15.7 with 512 of 2,000 tokens (SmolLM2-135M)", LONG_CONTEXT)
_PERPLEXITY_BEHIND = {"streaming": 15.5, "h2o": 16.8, "snapkv": 17.5}  # of 15.1 unmodified


class KvQuantization(Technique):
    """Keys and values in fewer bits: less to read in each step, and room for more sequences."""

    layer = "kv"
    family = "move fewer bytes"
    title = "KV cache quantization"
    baseline = "bf16 KV cache"
    lossless = False
    gain_metric = "tpot_s"
    attacks = ("memory_kv",)
    meant_by = dict.fromkeys(("fp8kv", "kvfp8", "fp8kvcache", "kvcachefp8"), "format: fp8") | dict.fromkeys(
        ("kivi", "kivi2"), "format: kivi2"
    )

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

    @classmethod
    def suited(cls, hardware: HardwareSpec) -> Self:
        return cls(format="int8" if hardware.kind == "cpu" else "fp8")

    @property
    def quality(self) -> Quality:
        format = _cache_format(self.format)
        return _KIVI4_QUALITY if format.name.startswith("kivi4") else of_width(format.width, _QUALITY_BY_BITS)


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
    attacks = ("memory_kv",)
    meant_by = dict.fromkeys(("streamingllm", "attentionsinks"), "policy: streaming") | {
        policy: f"policy: {policy}" for policy in ("h2o", "snapkv", "quest")
    }

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

    @classmethod
    def advised(cls, model: ModelSpec, hardware: HardwareSpec, parallel: Parallelism) -> Self | None:
        return cls() if "gqa" in model.mixer_kinds and "mla" not in model.mixer_kinds else None

    @property
    def quality(self) -> Quality:
        if self.policy == "quest":
            return _QUALITY_OF_QUEST
        after = _PERPLEXITY_BEHIND[self.policy]
        note = (
            f"15.1 to {after} with 512 of 2,000 tokens (SmolLM2-135M); worse where a question comes "
            "after its context was evicted"
        )
        return perplexity(3, 15.1, after, note, f"{LONG_CONTEXT}; claims X3")


def _cache_format(name: str) -> Precision:
    return parse_precision(name, "kv") or get_precision(name)
