"""What do mixers with a state of constant size cost: state space (Mamba), RWKV, linear attention?"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from membound.roofline.models.base import Frozen, LinearShape, WithoutKv, split, split_or_copy

StateBits = Literal[16, 32]


class Mamba2(WithoutKv, Frozen):
    """Mamba-2: each of `heads` keeps a state of head_dim x d_state; B and C are shared by the heads of a group."""

    kind: Literal["mamba2"] = "mamba2"
    heads: PositiveInt
    head_dim: PositiveInt
    d_state: PositiveInt
    groups: PositiveInt = 1
    conv_width: PositiveInt = 4
    state_bits: StateBits = 32
    gated_norm: bool = True
    bias: bool = False

    @property
    def d_inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def state_elements(self) -> int:
        return self.d_inner * self.d_state

    def state_elements_on_gpu(self, tp: int) -> int:
        return split(self.heads, tp, "heads") * self.head_dim * self.d_state

    @property
    def conv_channels(self) -> int:
        """x, B and C pass the convolution."""
        return self.d_inner + 2 * self.groups * self.d_state

    @property
    def conv_elements(self) -> int:
        return (self.conv_width - 1) * self.conv_channels

    def linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]:
        heads, groups = split(self.heads, tp, "heads"), split_or_copy(self.groups, tp, "groups")
        inner = heads * self.head_dim
        rows = 2 * inner + 2 * groups * self.d_state + heads  # z, x, B, C, dt
        return LinearShape("in_proj", rows, hidden), LinearShape("out_proj", hidden, inner)

    def vectors(self, hidden: int) -> int:
        """The convolution with its bias, A, D and the bias of dt of each head, the gated norm."""
        projections = self.d_inner + self.conv_channels + self.heads + hidden if self.bias else 0
        norm = self.d_inner if self.gated_norm else 0
        return (self.conv_width + 1) * self.conv_channels + 3 * self.heads + norm + projections


class Mamba1(WithoutKv, Frozen):
    """Mamba: each of `d_inner` channels keeps `d_state` values; dt comes from a projection of rank `dt_rank`.

    `inner_norms` are norms of dt, B and C (Jamba).
    """

    kind: Literal["mamba1"] = "mamba1"
    d_inner: PositiveInt
    d_state: PositiveInt
    dt_rank: PositiveInt
    conv_width: PositiveInt = 4
    state_bits: StateBits = 32
    inner_norms: bool = False

    @property
    def state_elements(self) -> int:
        return self.d_inner * self.d_state

    def state_elements_on_gpu(self, tp: int) -> int:
        return split(self.d_inner, tp, "d_inner") * self.d_state

    @property
    def conv_elements(self) -> int:
        return (self.conv_width - 1) * self.d_inner

    def linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]:
        inner = split(self.d_inner, tp, "d_inner")
        return (
            LinearShape("in_proj", 2 * inner, hidden),
            LinearShape("x_proj", self.dt_rank + 2 * self.d_state, inner),
            LinearShape("dt_proj", inner, self.dt_rank),
            LinearShape("out_proj", hidden, inner),
        )

    def vectors(self, hidden: int) -> int:
        """The convolution with its bias, the bias of dt, A, D, the inner norms."""
        norms = self.dt_rank + 2 * self.d_state if self.inner_norms else 0
        return self.d_inner * (self.conv_width + 1 + 1 + self.d_state + 1) + norms


class _SquareState(WithoutKv, Frozen):
    """A state of head_dim x head_dim a head."""

    heads: PositiveInt
    head_dim: PositiveInt
    state_bits: StateBits = 32

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def state_elements(self) -> int:
        return self.width * self.head_dim

    def state_elements_on_gpu(self, tp: int) -> int:
        return split(self.heads, tp, "heads") * self.head_dim**2


class _Rwkv(_SquareState):
    """What RWKV-6 and 7 share beside their state: the last token's input."""

    head_dim: PositiveInt = 64

    @property
    def conv_elements(self) -> int:
        """The last input of time mixing and of channel mixing."""
        return 2 * self.width


class Rwkv6(_Rwkv):
    """RWKV-6 (Finch): r, k, v, g and o, and low-rank matrices for the token shift and for the decay."""

    kind: Literal["rwkv6"] = "rwkv6"
    shift_rank: PositiveInt
    decay_rank: PositiveInt

    def linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]:
        width = split(self.heads, tp, "heads") * self.head_dim
        return (
            LinearShape("shift_a", 5 * self.shift_rank, hidden),
            LinearShape("shift_b", 5 * hidden, self.shift_rank),
            LinearShape("rkvg", 4 * width, hidden),
            LinearShape("decay_a", self.decay_rank, hidden),
            LinearShape("decay_b", width, self.decay_rank),
            LinearShape("o", hidden, width),
        )

    def vectors(self, hidden: int) -> int:
        """Six shift weights, the decay, the bonus, and the group norm's weight and bias."""
        return 6 * hidden + 2 * self.width + 2 * self.width


class Rwkv7(_Rwkv):
    """RWKV-7 (Goose): r, k, v and o, and low-rank matrices for the decay, the learning rate, V and the gate."""

    kind: Literal["rwkv7"] = "rwkv7"
    decay_rank: PositiveInt
    rate_rank: PositiveInt
    value_rank: PositiveInt
    gate_rank: PositiveInt

    @property
    def _ranks(self) -> int:
        return self.decay_rank + self.rate_rank + self.value_rank + self.gate_rank

    def linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]:
        width = split(self.heads, tp, "heads") * self.head_dim
        return (
            LinearShape("rkv", 3 * width, hidden),
            LinearShape("low_rank_a", self._ranks, hidden),
            LinearShape("low_rank_b", width, self._ranks),
            LinearShape("o", hidden, width),
        )

    def vectors(self, hidden: int) -> int:
        """Six shift weights, three offsets, k_k, k_a and r_k, and the group norm's weight and bias."""
        return 6 * hidden + 6 * self.width + 2 * self.width


class GatedDeltaNet(WithoutKv, Frozen):
    """Linear attention with the gated delta rule (Qwen3-Next, Qwen3.5): a state of key_dim x value_dim a value head."""

    kind: Literal["gated_delta_net"] = "gated_delta_net"
    key_heads: PositiveInt
    value_heads: PositiveInt
    key_head_dim: PositiveInt
    value_head_dim: PositiveInt
    conv_width: PositiveInt = 4
    state_bits: StateBits = 32

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads {self.value_heads} is not a multiple of key_heads {self.key_heads}")
        return self

    @property
    def state_elements(self) -> int:
        return self.value_heads * self.key_head_dim * self.value_head_dim

    def state_elements_on_gpu(self, tp: int) -> int:
        return split(self.value_heads, tp, "value_heads") * self.key_head_dim * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """q, k and v pass the convolution."""
        return 2 * self.key_heads * self.key_head_dim + self.value_heads * self.value_head_dim

    @property
    def conv_elements(self) -> int:
        return (self.conv_width - 1) * self.conv_channels

    def linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]:
        keys = split(self.key_heads, tp, "key_heads") * self.key_head_dim
        value_heads = split(self.value_heads, tp, "value_heads")
        values = value_heads * self.value_head_dim
        return (
            LinearShape("qkvz", 2 * keys + 2 * values, hidden),
            LinearShape("ba", 2 * value_heads, hidden),
            LinearShape("o", hidden, values),
        )

    def vectors(self, hidden: int) -> int:
        """The convolution, A and the bias of dt of each value head, the gated norm over a head."""
        return self.conv_width * self.conv_channels + 2 * self.value_heads + self.value_head_dim


class KimiDeltaAttention(_SquareState):
    """Linear attention with the delta rule and a decay for each channel (Kimi Linear, arXiv 2510.26692).

    Decay and output gate come through projections of rank `head_dim`.
    """

    kind: Literal["kda"] = "kda"
    conv_width: PositiveInt = 4

    @property
    def conv_elements(self) -> int:
        """q, k and v pass the convolution."""
        return (self.conv_width - 1) * 3 * self.width

    def linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]:
        """The way into the low ranks is whole on each GPU, that of the learning rate of each head is not."""
        heads = split(self.heads, tp, "heads")
        width = heads * self.head_dim
        return (
            LinearShape("qkv", 3 * width, hidden),
            LinearShape("gates_a", 2 * self.head_dim + heads, hidden),
            LinearShape("gates_b", 2 * width, self.head_dim),
            LinearShape("o", hidden, width),
        )

    def vectors(self, hidden: int) -> int:
        """The convolution, A of each head, the bias of dt of each channel, the gated norm over a head."""
        return self.conv_width * 3 * self.width + self.heads + self.width + self.head_dim


class ShortConv(WithoutKv, Frozen):
    """A gated short convolution (LFM2): each of `channels` looks at its last `conv_width` inputs, and nothing else."""

    kind: Literal["short_conv"] = "short_conv"
    channels: PositiveInt
    conv_width: PositiveInt = 3
    bias: bool = False

    @property
    def state_elements(self) -> int:
        return 0

    @property
    def state_bits(self) -> int:
        return 0

    def state_elements_on_gpu(self, tp: int) -> int:
        return 0

    @property
    def conv_elements(self) -> int:
        return (self.conv_width - 1) * self.channels

    def linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]:
        """The two gates and the convolution's input, then the way out."""
        channels = split(self.channels, tp, "channels")
        return LinearShape("in_proj", 3 * channels, hidden), LinearShape("out_proj", hidden, channels)

    def vectors(self, hidden: int) -> int:
        biases = 4 * self.channels + hidden if self.bias else 0
        return self.conv_width * self.channels + biases


class LightningAttention(WithoutKv, Frozen):
    """Linear attention with fixed decay and a gated output (MiniMax-M1): a state of head_dim x head_dim a head."""

    kind: Literal["lightning"] = "lightning"
    heads: PositiveInt
    head_dim: PositiveInt
    state_bits: StateBits = 32

    @property
    def state_elements(self) -> int:
        return self.heads * self.head_dim**2

    def state_elements_on_gpu(self, tp: int) -> int:
        return split(self.heads, tp, "heads") * self.head_dim**2

    @property
    def conv_elements(self) -> int:
        return 0

    def linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]:
        width = split(self.heads, tp, "heads") * self.head_dim
        return (
            LinearShape("qkv", 3 * width, hidden),
            LinearShape("output_gate", width, hidden),
            LinearShape("o", hidden, width),
        )

    def vectors(self, hidden: int) -> int:
        """The norm of the output."""
        return self.heads * self.head_dim
