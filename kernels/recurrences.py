"""What must kernels promise for layers that keep a state of constant size for each sequence?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from membound.kernels.base import DeltaNetVectors, Mamba2Vectors, RaggedBatch


class RecurrentKernels(Protocol):
    """The recurrences of `Kernels`; `recurrent.py` has their plain meaning."""

    def causal_convolution(
        self, state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, batch: RaggedBatch
    ) -> Tensor:
        """SiLU of a causal convolution of each channel of x [tokens, channels] by `weight` [channels, width]: fp32.

        `state` [seats, width - 1, channels] (fp32) holds a sequence's inputs before x, and those after it then. It
        counts as zero, as in all the recurrences below, for a sequence whose first new token is its first of all.
        """

    def mamba2_scan(
        self,
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        z: Tensor,
        vectors: Mamba2Vectors,
        batch: RaggedBatch,
    ) -> Tensor:
        """h = exp(dt a) h + dt x B^T, y = (h C + d x) silu(z) with dt = softplus(dt + bias): y as x, in fp32.

        `state` [seats, heads, head_dim, d_state] is h (fp32) and changes in place. x and z are [tokens, heads,
        head_dim], dt [tokens, heads], b and c [tokens, groups, d_state]; only their first dimension may have gaps.
        """

    def mamba1_scan(
        self,
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        z: Tensor,
        a: Tensor,
        d: Tensor,
        batch: RaggedBatch,
    ) -> Tensor:
        """h = exp(dt a) h + dt x B^T, y = (h C + d x) silu(z) for each channel: y [tokens, d_inner] in fp32.

        `state` [seats, d_inner, d_state] is h (fp32) and changes in place. x, z and dt (positive) are [tokens,
        d_inner], b and c [tokens, d_state], a [d_inner, d_state] (negative) and d [d_inner] in fp32.
        """

    def rwkv6_scan(
        self, state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, u: Tensor, batch: RaggedBatch
    ) -> Tensor:
        """y = r (S + u k^T v), then S = diag(w) S + k^T v for each head: y as v.

        `state` [seats, heads, key, value] is S (fp32) and changes in place; r, w, k [tokens, heads, key] and v
        [tokens, heads, value] are fp32, u is [heads, key].
        """

    def delta_scan(
        self, state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, batch: RaggedBatch
    ) -> Tensor:
        """S = diag(w) S + b^T (a S) + k^T v, y = r S for each head: the delta rule of RWKV-7 and of gated DeltaNet.

        As `rwkv6_scan`, with a and b [tokens, heads, key].
        """

    def gated_delta(
        self, state: Tensor, mixed: Tensor, ba: Tensor, vectors: DeltaNetVectors, batch: RaggedBatch, key_heads: int
    ) -> Tensor:
        """Linear attention with the gated delta rule: S = g S, S += k (beta (v - k S))^T, y = q S for each value head.

        mixed [tokens, ...] (fp32) holds q and k of `key_heads`, which are brought to length 1 and shared by
        neighbouring value heads, and v. ba [tokens, 2 * heads] holds b and r of beta = sigmoid(b) and
        g = exp(a softplus(r + dt_bias)).
        `state` [seats, heads, key, value] is S (fp32) and changes in place; y is [tokens, heads, value].
        """
