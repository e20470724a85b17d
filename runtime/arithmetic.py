"""What does a model compute that costs nothing, so that its spec does not say it?

A spec holds what a step costs. Where a norm stands, how scores are scaled or capped, how positions turn and how a
router chooses are the rest of what the numbers depend on; random weights do without it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from membound.roofline.models import ModelSpec
from membound.roofline.models.base import Frozen

Placement = Literal["before", "after", "around", "parallel"]
Pairs = Literal["halves", "neighbours"]


class Routing(Frozen):
    """How a mixture chooses experts and weighs what they return.

    Scores are the softmax or the sigmoid of the router's logits, the weights of the chosen sum to 1 if `normalized`,
    and are then multiplied by `scale`. `bias` is added to the logits (gpt-oss), or to the scores for the choice alone
    ("selection": DeepSeek-V3's balance without an auxiliary loss, arXiv 2412.19437, section 2.1.2). With `groups` of
    experts a token chooses within the `group_top_k` that score best, by their best expert or the sum of their best two.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    scale: float = 1.0
    bias: Literal["logits", "selection"] = "logits"
    groups: PositiveInt = 1
    group_top_k: PositiveInt = 1
    group_score: Literal["best", "best_two"] = "best"


class LinearScaling(Frozen):
    """All rotations slowed by `factor` (Chen et al. 2023, arXiv 2306.15595)."""

    kind: Literal["linear"] = "linear"
    factor: PositiveFloat


class YarnScaling(Frozen):
    """YaRN (Peng et al. 2023, arXiv 2309.00071): slow rotations are slowed by `factor`, fast ones are kept.

    `magnitude` multiplies cos and sin. `truncate` rounds the edges between slow and fast to whole dimensions.
    """

    kind: Literal["yarn"] = "yarn"
    factor: PositiveFloat
    original_max_context: PositiveInt
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    magnitude: PositiveFloat = 1.0
    truncate: bool = True


class Arithmetic(Frozen):
    """The choices of a family.

    Norms stand `before` a part, `after` it (OLMo 2), `around` it (Gemma 2), or before attention and network that run
    side by side (`parallel`). What a part adds is multiplied by `residual_scale` (Granite). `windowed_rope_theta` is
    for layers with a window, which then are not scaled (Gemma 3); layers in `unrotated` have no positions. `glu_limit`
    clamps what a gated network multiplies (gpt-oss).
    """

    placement: Placement = "before"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    final_softcap: PositiveFloat | None = None
    attention_scale: PositiveFloat | None = None
    attention_softcap: PositiveFloat | None = None
    rope_scaling: LinearScaling | YarnScaling | None = Field(default=None, discriminator="kind")
    windowed_rope_theta: PositiveFloat | None = None
    unrotated: tuple[int, ...] = ()
    glu_limit: PositiveFloat | None = None
    routing: Routing = Routing()

    @classmethod
    def typical(cls, spec: ModelSpec) -> Arithmetic:
        """What the shape of a model implies: norms where their number says, the rest as in Llama."""
        placement: Placement = {1: "parallel", 4: "around"}.get(spec.norms_per_layer, "before")  # type: ignore[assignment]
        return cls(placement=placement)
