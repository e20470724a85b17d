"""What does a feed-forward network cost: dense, gated, or a mixture of experts?"""

from __future__ import annotations

from typing import Literal, Protocol, Self

from pydantic import NonNegativeInt, PositiveInt, model_validator

from membound.roofline.models.base import Frozen, LinearShape, padded_share


class FeedForward(Protocol):
    """What every kind of feed-forward network says of one layer; widths that `tp` does not divide are padded."""

    def linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]:
        """The matrices of one GPU that every token passes."""

    def vectors(self, hidden: int) -> int:
        """Parameters outside all linears: biases."""


class GatedFfn(Frozen):
    """down(act(gate(x)) * up(x)), as SwiGLU and GeGLU are."""

    kind: Literal["gated"] = "gated"
    intermediate: PositiveInt
    bias: bool = False

    def linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]:
        return _gate_up_down(hidden, padded_share(self.intermediate, tp), gated=True)

    def vectors(self, hidden: int) -> int:
        return self.bias * (2 * self.intermediate + hidden)


class DenseFfn(Frozen):
    """down(act(up(x))): two matrices (GPT-2 and 3, OPT, Falcon, BLOOM, MPT)."""

    kind: Literal["dense"] = "dense"
    intermediate: PositiveInt
    bias: bool = False

    def linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]:
        return _gate_up_down(hidden, padded_share(self.intermediate, tp), gated=False)

    def vectors(self, hidden: int) -> int:
        return self.bias * (self.intermediate + hidden)


class ChannelMix(Frozen):
    """RWKV's network: value(relu(key(x))^2), in RWKV-6 gated by a receptance matrix [hidden, hidden]."""

    kind: Literal["channel_mix"] = "channel_mix"
    intermediate: PositiveInt
    receptance: bool

    def linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]:
        receptance = (LinearShape("receptance", padded_share(hidden, tp), hidden),) if self.receptance else ()
        return *receptance, *_gate_up_down(hidden, padded_share(self.intermediate, tp), gated=False)

    def vectors(self, hidden: int) -> int:
        """The token shift's weights."""
        return (1 + self.receptance) * hidden


class MoeFfn(Frozen):
    """A mixture of `experts`, of which a token takes `top_k`, beside shared experts that every token takes.

    `shared_intermediate` is the sum over the shared experts, `shared_gate` a scalar gate on them (Qwen2-MoE). With
    `latent` the routed experts work on a projection of the hidden state to that width (Nemotron-3). With `choice`
    "expert" each expert takes the same number of a step's tokens, those that suit it best, so that a token has `top_k`
    experts on average (Zhou et al. 2022, arXiv 2202.09368). Where experts are in `groups`, all of a token's are in
    `groups_taken` of them, so that it is sent to few nodes (DeepSeek-V2 and V3). Of `top_k` choices some fall on
    `zero_experts`, which give a token back as it is and have no weights (LongCat-Flash, arXiv 2509.01322).
    """

    kind: Literal["moe"] = "moe"
    experts: PositiveInt
    top_k: PositiveInt
    intermediate: PositiveInt
    shared_intermediate: NonNegativeInt = 0
    shared_gate: bool = False
    gated: bool = True
    router_bias: bool = False
    expert_bias: bool = False
    latent: PositiveInt | None = None
    choice: Literal["token", "expert"] = "token"
    groups: PositiveInt = 1
    groups_taken: PositiveInt = 1
    zero_experts: NonNegativeInt = 0

    @model_validator(mode="after")
    def _top_k_exists(self) -> Self:
        if self.zero_experts and self.choice == "expert":
            raise ValueError(f"zero_experts is {self.zero_experts}, but experts that choose tokens compute all of them")
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than experts {self.experts}")
        if self.groups_taken > self.groups:
            raise ValueError(f"groups_taken {self.groups_taken} is more than groups {self.groups}")
        return self

    @property
    def computed_per_token(self) -> float:
        """Experts that compute a token: on average, where some of its choices fall on those that compute nothing."""
        return self.top_k * self.experts / (self.experts + self.zero_experts)

    @property
    def node_groups(self) -> tuple[int, int] | None:
        """Groups of experts and how many of them a token takes, where it does not take all."""
        return (self.groups, self.groups_taken) if self.groups_taken < self.groups else None

    def linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]:
        """The router, whole on each GPU, the shared experts, and the way to the experts' width and back."""
        shapes = [LinearShape("router", self.experts + self.zero_experts, hidden)]
        if self.shared_intermediate:
            shared = _gate_up_down(hidden, padded_share(self.shared_intermediate, tp), self.gated)
            shapes += [LinearShape(f"shared_{name}", n, k) for name, n, k in shared]
        if self.shared_gate:
            shapes.append(LinearShape("shared_gate", 1, hidden))
        if self.latent:
            shapes += [LinearShape("latent_in", self.latent, hidden), LinearShape("latent_out", hidden, self.latent)]
        return tuple(shapes)

    def expert_linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]:
        """The matrices of one routed expert on one GPU."""
        return _gate_up_down(self.latent or hidden, padded_share(self.intermediate, tp), self.gated)

    def vectors(self, hidden: int) -> int:
        width = (2 if self.gated else 1) * self.intermediate + hidden
        return self.router_bias * (self.experts + self.zero_experts) + self.expert_bias * self.experts * width


class NoFfn(Frozen):
    """A layer without a feed-forward network: only its mixer (Nemotron-H, Mamba)."""

    kind: Literal["none"] = "none"

    def linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]:
        return ()

    def vectors(self, hidden: int) -> int:
        return 0


def _gate_up_down(hidden: int, intermediate: int, gated: bool) -> tuple[LinearShape, ...]:
    first = LinearShape("gate_up", 2 * intermediate, hidden) if gated else LinearShape("up", intermediate, hidden)
    return first, LinearShape("down", hidden, intermediate)
