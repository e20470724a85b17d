"""Which techniques are there, what is each compared with, and what does it change?

A technique is declared here once. `apply` says what it changes in the engine's set-up; the simulator costs that
set-up, the runtime builds it, and the dashboard and the comparison iterate over `TECHNIQUES`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Union

from pydantic import BaseModel, ConfigDict, Field

from membound.roofline.parallel import SINGLE, Parallelism
from membound.roofline.precision import PRECISIONS, Precision
from membound.roofline.precision_plan import PrecisionPlan

Layer = Literal["weights", "kv", "schedule", "steps"]
Family = Literal[
    "move fewer bytes", "move less data", "use a read more than once", "take fewer steps", "compute less per step"
]
GainMetric = Literal["tpot_s", "output_tokens_per_s"]
PolicyName = Literal["static", "continuous"]


@dataclass(frozen=True)
class NgramDrafts:
    """Prompt lookup: up to `gamma` tokens that followed the last occurrence of the newest `max_ngram` tokens."""

    gamma: int
    max_ngram: int
    min_ngram: int
    hit_rate: float
    alpha: float


@dataclass(frozen=True)
class EngineSetup:
    """What the techniques of a scenario leave for the engine to be: the one input of cost and of construction."""

    precision: PrecisionPlan = PrecisionPlan()
    policy: PolicyName = "static"
    drafts: NgramDrafts | None = None
    parallel: Parallelism = SINGLE
    fused_attention: bool = True
    absorbed_mla: bool = True
    expert_skew: float = 0.0
    profile: str = "graphs"

    @property
    def weights(self) -> Precision:
        """The weight format of the layers."""
        return self.precision.weights

    @property
    def kv(self) -> Precision:
        """The format of the cache of layers without a window."""
        return self.precision.kv


class Technique(BaseModel):
    """Common to all techniques: what it is, what it is compared with, and its change to the set-up."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layer: ClassVar[Layer]
    family: ClassVar[Family]
    title: ClassVar[str]
    baseline: ClassVar[str]
    lossless: ClassVar[bool]
    gain_metric: ClassVar[GainMetric]

    name: str

    def apply(self, setup: EngineSetup) -> EngineSetup:
        """The set-up with this technique switched on."""
        raise NotImplementedError

    def needs_batch(self) -> bool:
        """Whether the technique is without meaning at a batch of one."""
        return False


class Int8Weights(Technique):
    """Weight-only int8, round to nearest, one fp32 scale a row: half the bytes of bf16 for each step."""

    layer = "weights"
    family = "move fewer bytes"
    title = "8-bit weights"
    baseline = "bf16 weights"
    lossless = False
    gain_metric = "tpot_s"

    name: Literal["int8_weights"] = "int8_weights"

    def apply(self, setup: EngineSetup) -> EngineSetup:
        plan = replace(setup.precision, weights=PRECISIONS["int8"], exceptions=(("embedding", setup.precision.plain),))
        return replace(setup, precision=plan)


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


class NgramSpeculation(Technique):
    """Prompt-lookup speculation, verified so that the output is that of plain decoding.

    `hit_rate` and `alpha` describe content that nobody recorded: the share of steps in which a draft is found, and
    the chance that a drafted token is accepted. With recorded content both are unused: the drafts are replayed.
    """

    layer = "steps"
    family = "take fewer steps"
    title = "n-gram speculation"
    baseline = "one token a step"
    lossless = True
    gain_metric = "tpot_s"

    name: Literal["ngram_speculation"] = "ngram_speculation"
    gamma: int = Field(4, ge=1, le=32, description="draft length: tokens proposed in a step at most")
    max_ngram: int = Field(3, ge=1, le=16, description="longest suffix that is looked up")
    min_ngram: int = Field(2, ge=1, le=16, description="shortest suffix that is looked up")
    hit_rate: float = Field(0.5, ge=0, le=1)
    alpha: float = Field(0.5, ge=0, le=1)

    def apply(self, setup: EngineSetup) -> EngineSetup:
        drafts = NgramDrafts(self.gamma, self.max_ngram, self.min_ngram, self.hit_rate, self.alpha)
        return replace(setup, drafts=drafts)


AnyTechnique = Annotated[
    Union[Int8Weights, ContinuousBatching, NgramSpeculation],  # noqa: UP007 (pydantic reads the union at run time)
    Field(discriminator="name"),
]

TECHNIQUES: dict[str, type[Technique]] = {
    cls.model_fields["name"].default: cls for cls in (Int8Weights, ContinuousBatching, NgramSpeculation)
}


def engine_setup(techniques: tuple[Technique, ...] | list[Technique]) -> EngineSetup:
    """The set-up that a list of techniques makes of the plain engine (bf16, static batching, no speculation)."""
    setup = EngineSetup()
    for technique in techniques:
        setup = technique.apply(setup)
    return setup
