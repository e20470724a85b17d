"""What is an engine, as far as cost and construction are concerned?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from membound.roofline.parallel import SINGLE, Parallelism
from membound.roofline.precision import Precision
from membound.roofline.precision.plan import PrecisionPlan
from membound.roofline.shape import Count, StepShape
from membound.roofline.techniques.drafts import Drafts

PolicyName = Literal["static", "continuous"]
EvictionPolicy = Literal["streaming", "h2o", "snapkv", "quest"]
PLAIN = PrecisionPlan()


@dataclass(frozen=True)
class KvBudget:
    """Of each sequence attention reads `tokens` tokens in decode: those that `policy` keeps, or the best pages of all.

    The first `sinks` and the last `recent` ones stay whatever happens; `page` tokens are chosen together.
    """

    policy: EvictionPolicy
    tokens: int
    sinks: int = 0
    recent: int = 0
    page: int = 1

    @property
    def evicts(self) -> bool:
        """Whether what is not chosen is lost, so that the cache stays small; Quest keeps everything."""
        return self.policy != "quest"

    @property
    def scoring(self) -> int | None:
        """The last queries of a prompt whose attention is worked out a second time; None for all, 0 for none."""
        return {"streaming": 0, "h2o": None, "snapkv": self.recent, "quest": 0}[self.policy]


@dataclass(frozen=True)
class ExpertStorage:
    """The routed experts lie in `place`, from where `gb_per_s` come; a device keeps `cached` of each layer's."""

    cached: int
    place: Literal["host", "disk"]
    prefetch: bool = True
    gb_per_s: float | None = None


@dataclass(frozen=True)
class BatchOverlap:
    """A step is computed in two halves from so many tokens on, `decode_tokens` in steps without prompts.

    In steps with prompts `communication_units` of the device's units move messages instead of computing.
    """

    decode_tokens: int
    prefill_tokens: int
    communication_units: int = 0

    def halves(self, shape: StepShape, dp: int) -> Count:
        """2 where a data-parallel rank has tokens enough to be split, else 1; of prompts also single ones are cut."""
        prompts, tokens = shape.prefill_sequences > 0, shape.tokens / dp
        enough = np.where(prompts, tokens >= self.prefill_tokens, tokens >= self.decode_tokens)
        split: Count = np.where(enough & (prompts | (shape.sequences / dp >= 2)), 2.0, 1.0)
        return split if np.ndim(shape.tokens) else float(split)


@dataclass(frozen=True)
class EngineSetup:
    """What the techniques of a scenario leave for the engine to be: the one input of cost and of construction.

    With `redundant_experts` experts are balanced over the devices of expert parallelism, with so many copies.
    `expert_skew` is how popular they are: an exponent, or the measured loads of each.
    """

    precision: PrecisionPlan = PLAIN
    policy: PolicyName = "static"
    drafts: Drafts | None = None
    parallel: Parallelism = SINGLE
    fused_attention: bool = True
    absorbed_mla: bool = True
    expert_skew: float | tuple[float, ...] = 0.0
    profile: str = "graphs"
    kv_budget: KvBudget | None = None
    expert_storage: ExpertStorage | None = None
    redundant_experts: int | None = None
    overlap: BatchOverlap | None = None

    def budget_of(self, mixer_kind: str) -> KvBudget | None:
        """The budget of a layer's cache, where it has one for each KV head."""
        return self.kv_budget if mixer_kind == "gqa" else None

    @property
    def weights(self) -> Precision:
        """The weight format of the layers."""
        return self.precision.weights

    @property
    def kv(self) -> Precision:
        """The format of the cache of layers without a window."""
        return self.precision.kv
