"""What is an engine, as far as cost and construction are concerned?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from membound.roofline.errors import MemboundError
from membound.roofline.parallel import SINGLE, Parallelism
from membound.roofline.precision import Precision
from membound.roofline.precision_plan import PrecisionPlan
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
    kv_budget: KvBudget | None = None
    expert_storage: ExpertStorage | None = None

    def budget_of(self, mixer_kind: str) -> KvBudget | None:
        """The budget of a layer's cache; raises MemboundError for latents, of which every token serves all heads."""
        if self.kv_budget is not None and mixer_kind == "mla":
            raise MemboundError(
                "kv_eviction chooses tokens for each KV head, and latent attention (MLA) has one latent for all heads; "
                "leave it out"
            )
        return self.kv_budget if mixer_kind == "gqa" else None

    @property
    def weights(self) -> Precision:
        """The weight format of the layers."""
        return self.precision.weights

    @property
    def kv(self) -> Precision:
        """The format of the cache of layers without a window."""
        return self.precision.kv
