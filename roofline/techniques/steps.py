"""Which techniques take several tokens in a step?

The acceptance that a technique states describes content that nobody recorded: with a task's profile or recorded content
it is unused. Defaults carry their source beside them. A length or a tree that nobody names is open: stacks, advice and
closed forms choose the best one for the operating point (`speculation/draft_choice.py`), all else takes `usual_size`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from membound.roofline.errors import MemboundError
from membound.roofline.parallel import Parallelism
from membound.roofline.speculation.token_tree import GROWN_RANK_EXPONENT, RANK_EXPONENT
from membound.roofline.techniques.base import Attacked, Technique
from membound.roofline.techniques.drafts import (
    Drafts,
    EagleDrafts,
    MedusaDrafts,
    ModelDrafts,
    MtpDrafts,
    NgramDrafts,
    SelfDrafts,
)
from membound.roofline.techniques.quality import Quality
from membound.roofline.techniques.setup import EngineSetup
from membound.roofline.techniques.weights import weights_in

if TYPE_CHECKING:
    from membound.roofline.hardware import HardwareSpec
    from membound.roofline.models import ModelSpec

# What is tried where a length or a tree is open.
MOST_CHAIN, MOST_DEPTH = 16, 8
TREE_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 25, 32, 48, 64)


class Size(NamedTuple):
    """Positions ahead, and the guesses of a tree over them; None for a chain."""

    depth: int
    nodes: int | None


class Speculative(Technique):
    """Common to all that guess tokens and verify them, so that the output is that of plain decoding.

    `size_fields` are the fields that a size is written to: the depth, and the nodes of a tree where it has one.
    """

    size_fields: ClassVar[tuple[str, ...]] = ("gamma",)
    usual_size: ClassVar[Size]
    usual_alpha: ClassVar[float]
    most_depth: ClassVar[int] = MOST_CHAIN

    layer = "steps"
    family = "take fewer steps"
    baseline = "one token a step"
    lossless = True
    gain_metric = "tpot_s"
    attacks: ClassVar[tuple[Attacked, ...]] = ("memory_weights", "memory_kv")

    adaptive: bool = Field(
        False, description="each step drafts as many tokens as have paid so far, up to the length given, or none"
    )

    def drafts(self) -> Drafts:
        """What the technique proposes."""
        raise NotImplementedError

    @property
    def _chance(self) -> dict[str, Any]:
        """alpha as given, else the usual one."""
        given: float | None = getattr(self, "alpha", None)
        return {"alpha": self.usual_alpha, "assumed": True} if given is None else {"alpha": given}

    @property
    def given(self) -> Size:
        """The size as far as it is named; a depth of 0 is open, and so are no nodes of a tree."""
        values = [getattr(self, field) for field in self.size_fields]
        return Size(values[0] or 0, values[1] if len(values) > 1 else None)

    @property
    def is_open(self) -> bool:
        """Whether a part of its size is left to the operating point."""
        return any(getattr(self, field) is None for field in self.size_fields)

    @property
    def size(self) -> Size:
        """As given; what is open is as usual."""
        depth, nodes = self.given.depth or self.usual_size.depth, self.given.nodes or self.usual_size.nodes
        return Size(depth, None if nodes is None else max(depth, nodes))

    def sizes(self) -> Iterator[Size]:
        """Every size that what is given allows."""
        depth, nodes = self.given
        is_tree = len(self.size_fields) > 1
        for one in [depth] if depth else range(1, self.most_depth + 1):
            for count in [nodes] if nodes or not is_tree else TREE_SIZES:
                if count is None or count >= one:
                    yield Size(one, count)

    def sized(self, size: Size) -> Self:
        """The same with this size."""
        return self.model_copy(update=dict(zip(self.size_fields, size, strict=False)))

    def apply(self, setup: EngineSetup) -> EngineSetup:
        if setup.drafts is not None:
            raise MemboundError(
                f"{self.name} and speculation by {setup.drafts.kind} cannot both draft a step; give one of them"
            )
        return replace(setup, drafts=replace(self.drafts(), adaptive=self.adaptive))


class NgramSpeculation(Speculative):
    """Prompt-lookup speculation.

    `hit_rate` and `alpha` describe content that nobody recorded: the share of steps in which a draft is found, and
    the chance that a drafted token is accepted. With recorded content both are unused: the drafts are replayed.
    """

    title = "n-gram speculation"
    meant_by = dict.fromkeys(("ngram", "promptlookup", "promptlookupdecoding"), "")
    usual_size = Size(4, None)

    name: Literal["ngram_speculation"] = "ngram_speculation"
    gamma: int | None = Field(None, ge=1, le=32, description="draft length, tokens a step at most; best if not given")
    max_ngram: int = Field(3, ge=1, le=16, description="longest suffix that is looked up")
    min_ngram: int = Field(2, ge=1, le=16, description="shortest suffix that is looked up")
    hit_rate: float = Field(0.5, ge=0, le=1)
    alpha: float = Field(0.5, ge=0, le=1)

    @model_validator(mode="after")
    def _some_suffix_is_looked_up(self) -> NgramSpeculation:
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram is {self.min_ngram}, above max_ngram ({self.max_ngram}), so that nothing is looked up; "
                "give at most max_ngram"
            )
        return self

    def drafts(self) -> Drafts:
        return NgramDrafts(
            gamma=self.size.depth,
            alpha=self.alpha,
            hit_rate=self.hit_rate,
            max_ngram=self.max_ngram,
            min_ngram=self.min_ngram,
        )


class DraftModelSpeculation(Speculative):
    """A smaller model of the same vocabulary drafts (Leviathan et al., ICML 2023; Chen et al., 2023).

    alpha: 0.75 for T5-small drafting for T5-XXL on translation, Leviathan et al., table 2 (from memory).
    """

    title = "draft-model speculation"
    meant_by = dict.fromkeys(("speculativedecoding", "speculation", "speculative", "draftmodel"), "")
    usual_size = Size(4, None)

    name: Literal["draft_model_speculation"] = "draft_model_speculation"
    draft: str | None = Field(None, description="a model as in the scenario's; without it the smallest of the family")
    weights: str | None = Field(
        None, description="the draft's weights, as the scenario's; those of its file, or the same"
    )
    format: str | None = Field(
        None, description="the format of the draft's weights, such as int8; without it the model's"
    )
    gamma: int | None = Field(None, ge=1, le=32, description="draft length, tokens a step; the best if not given")
    alpha: float = Field(0.75, ge=0, le=1, description="chance that a drafted token is accepted")

    @field_validator("format")
    @classmethod
    def _is_known(cls, format: str | None) -> str | None:
        if format is not None:
            weights_in(format)
        return format

    def drafts(self) -> Drafts:
        return ModelDrafts(
            gamma=self.size.depth, alpha=self.alpha, draft=self.draft, weights=self.weights, format=self.format
        )


class SelfSpeculation(Speculative):
    """The model's own first layers draft, so that neither weights nor a cache are added (Zhang et al., 2024).

    A model that was not trained to exit early is seldom right early: the default is three quarters of the layers, and
    nobody is advised to it. alpha is assumed; `membound measure` with `weights: pretrained` says what it is.
    """

    title = "self-speculation by the first layers"
    attacks = ()
    meant_by = dict.fromkeys(("layerskip", "selfspeculative", "selfspeculativedecoding"), "")
    usual_size = Size(2, None)

    name: Literal["self_speculation"] = "self_speculation"
    layers: int | None = Field(None, ge=1, description="layers that draft, fewer than the model's; 3/4 if not given")
    gamma: int | None = Field(None, ge=1, le=32, description="draft length, tokens a step; the best if not given")
    alpha: float = Field(0.5, ge=0, le=1, description="chance that a drafted token is accepted")

    def drafts(self) -> Drafts:
        return SelfDrafts(gamma=self.size.depth, alpha=self.alpha, layers=self.layers)

    @classmethod
    def advised(cls, model: ModelSpec, hardware: HardwareSpec, parallel: Parallelism) -> Self | None:
        return None


_TYPICAL_QUALITY = Quality(
    1,
    "the same tokens at temperature 0; above it, others than the model would draw",
    "by construction: Cai et al., Medusa, arXiv 2401.10774, section 2.3.1",
    "other draws",
)


class _UnlessTypical:
    """Whether a technique is lossless: its class is, and so is one whose acceptance is exact."""

    def __get__(self, technique: TrainedHead | None, owner: type[TrainedHead]) -> bool:
        return technique is None or technique.acceptance == "exact"


class TrainedHead(Speculative):
    """Common to heads that were trained for a model."""

    lossless: ClassVar[Any] = _UnlessTypical()

    head: str | None = Field(None, description="file of `membound train-draft`; without it the one that is shipped")
    guessable: int | None = Field(
        None, ge=1, description="tokens that the head can guess, by their rows of the lm_head; all if not given"
    )
    rank_exponent: float = Field(
        RANK_EXPONENT, gt=0, le=4, description="the chance that none of the first r guesses is right falls as r^-this"
    )
    acceptance: Literal["exact", "typical"] = Field(
        "exact", description="typical accepts what is likely enough above temperature 0, and is not lossless"
    )

    @property
    def quality(self) -> Quality:
        return super().quality if self.lossless else _TYPICAL_QUALITY

    @property
    def _common(self) -> dict[str, Any]:
        return {
            "head": self.head,
            "guessable": self.guessable,
            "rank_exponent": self.rank_exponent,
            "typical": self.acceptance == "typical",
        }


class Medusa(TrainedHead):
    """Heads on the last hidden state, one for each position ahead; a tree of their guesses (Cai et al., 2024).

    Verified exactly unless `acceptance` is the paper's typical one, which accepts more. The usual alpha, decay and
    exponent are those that lead to the 2.31 tokens a step that Spec-Bench measured with Vicuna-7B (A100, greedy).
    """

    title = "Medusa heads"
    size_fields = ("heads", "tree_size")
    usual_size = Size(4, 63)
    usual_alpha = 0.4
    most_depth = 4

    name: Literal["medusa"] = "medusa"
    heads: int | None = Field(None, ge=1, le=16, description="positions ahead, each with a head; best if not given")
    tree_size: int | None = Field(None, ge=1, le=1024, description="guesses that a step verifies; best if not given")
    alpha: float | None = Field(
        None, ge=0, le=1, description="chance that the best guess of the first head is right; as counted if not given"
    )
    decay: float = Field(0.5, gt=0, le=1, description="the same of each further head, as a share of the one before")
    rank_exponent: float = Field(
        0.4, gt=0, le=4, description="the chance that none of the first r guesses is right falls as r^-this"
    )

    def drafts(self) -> Drafts:
        depth, nodes = self.size
        return MedusaDrafts(gamma=depth, decay=self.decay, nodes=nodes, **self._chance, **self._common)


class Eagle(TrainedHead):
    """One trained layer continues the model's hidden states; a tree of its guesses (Li et al., EAGLE-2, 2024).

    The usual alpha and decay: 0.79, 0.74, 0.72, 0.73, 0.67 at five positions with Vicuna-7B on MT-bench; 25 nodes:
    EAGLE, 2024 (from memory). What others counted for a model comes first: `data/drafts/published.yaml`.
    """

    title = "EAGLE"
    meant_by = dict.fromkeys(("eagle1", "eagle2", "eagle3"), "")
    size_fields = ("depth", "tree_size")
    usual_size = Size(5, 25)
    usual_alpha = 0.79
    most_depth = MOST_DEPTH

    name: Literal["eagle"] = "eagle"
    depth: int | None = Field(None, ge=1, le=32, description="tokens of the longest path of guesses; best if not given")
    tree_size: int | None = Field(
        None, ge=1, le=1024, description="guesses that a step verifies, the depth for a chain; the best if not given"
    )
    alpha: float | None = Field(
        None, ge=0, le=1, description="chance that the best first guess is right; as counted for the model if not given"
    )
    decay: float = Field(0.97, gt=0, le=1, description="the same at each further one, as a share of the one before")
    rank_exponent: float = Field(
        GROWN_RANK_EXPONENT,
        gt=0,
        le=4,
        description="the chance that none of the first r guesses is right falls as r^-this",
    )

    @model_validator(mode="after")
    def _path_is_in_the_tree(self) -> Self:
        if self.depth is not None and self.tree_size is not None and self.depth > self.tree_size:
            raise ValueError(
                f"depth is {self.depth}, more than tree_size, {self.tree_size}: each guess of the longest path is one "
                "of the tree; give a smaller depth or a larger tree"
            )
        return self

    def drafts(self) -> Drafts:
        depth, nodes = self.size
        return EagleDrafts(gamma=depth, decay=self.decay, nodes=nodes, **self._chance, **self._common)


class Mtp(Speculative):
    """The model's own module for the token after the next drafts, again and again (DeepSeek-V3, 2024, section 5.4.3).

    The usual alpha: 0.85 to 0.90 for the first token (DeepSeek-V3, section 5.4.3); decay: SGLang's 2.18 and 2.44 tokens
    a step with 2 and 3 drafts (LMSYS on DeepSeek-V3, measured_e2e_dev.csv of the facts) fall below a constant rate.
    """

    title = "multi-token prediction"
    meant_by = dict.fromkeys(("multitokenprediction", "nextn"), "")
    usual_size = Size(1, None)
    usual_alpha = 0.85
    most_depth = MOST_DEPTH

    name: Literal["mtp"] = "mtp"
    gamma: int | None = Field(
        None, ge=1, le=16, description="tokens a step, a run of the module each; best if not given"
    )
    alpha: float | None = Field(
        None, ge=0, le=1, description="chance that the first drafted token is accepted; as counted if not given"
    )
    decay: float = Field(0.8, gt=0, le=1, description="the same of each further token, as a share of the one before")

    def drafts(self) -> Drafts:
        return MtpDrafts(gamma=self.size.depth, decay=self.decay, **self._chance)

    @classmethod
    def advised(cls, model: ModelSpec, hardware: HardwareSpec, parallel: Parallelism) -> Self | None:
        return cls() if model.mtp_layers else None
