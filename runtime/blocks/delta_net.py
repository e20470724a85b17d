"""How does linear attention with the gated delta rule mix tokens?

Yang et al. 2024, Gated Delta Networks, arXiv 2412.06464, section 3.1, as Qwen3-Next has it: for each value head
S = g S, then S += k (beta (v - k S))^T, y = q S, with q and k of length 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from membound.kernels.base import Kernels, RaggedBatch
from membound.roofline.models.recurrent import GatedDeltaNet
from membound.runtime.blocks.base import LayerCache
from membound.runtime.blocks.states import SeatStates
from membound.runtime.linear import Linear

_LENGTH_EPS = 1e-6


class DeltaNetMixer:
    """A layer of Qwen3-Next."""

    def __init__(
        self,
        spec: GatedDeltaNet,
        kernels: Kernels,
        linears: Mapping[str, Linear],
        weights: Mapping[str, Tensor],
        eps: float,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.kernels = kernels
        self._linears = linears
        self.weights = weights
        self.eps = eps
        self.device = device

    def __call__(self, x: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        assert isinstance(cache, SeatStates)
        spec, weights, states = self.spec, self.weights, cache.parts
        width = spec.value_heads * spec.value_head_dim
        qkv, z = self._linears["qkvz"](x).split([spec.conv_channels, width], dim=-1)
        b, a = self._linears["ba"](x).float().chunk(2, dim=-1)  # [tokens, value_heads]
        beta, kept = b.sigmoid(), (weights["a"] * functional.softplus(a + weights["dt_bias"])).exp()
        mixed = self.kernels.causal_convolution(states["conv"], qkv, weights["conv"], None, batch)
        q, k, v = self._heads(mixed)
        # What k finds in the state is removed from it at the rate beta: S = g S + k^T beta (v - g k S).
        gate = kept[..., None].expand_as(k).contiguous()
        removed = -(beta * kept)[..., None] * k
        out = self.kernels.delta_scan(states["state"], q, gate, k, beta[..., None] * v, k, removed, batch)
        normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + self.eps) * weights["gated_norm"]
        y = normed.flatten(1) * functional.silu(z.float())
        return self._linears["o"](y.to(self.kernels.activation_dtype))

    def new_cache(self, num_blocks: int, block_size: int, seats: int) -> SeatStates:
        spec = self.spec
        state = (spec.value_heads, spec.key_head_dim, spec.value_head_dim)
        return SeatStates.zeroed(seats, self.device, conv=(spec.conv_width - 1, spec.conv_channels), state=state)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        return iter(self._linears.items())

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [tokens, value_heads, key_head_dim] of length 1 (q then scaled), and v."""
        spec = self.spec
        keys = spec.key_heads * spec.key_head_dim
        q, k, v = mixed.split([keys, keys, mixed.shape[1] - 2 * keys], dim=-1)
        each = spec.value_heads // spec.key_heads
        q, k = (part.unflatten(1, (spec.key_heads, -1)).repeat_interleave(each, dim=1) for part in (q, k))
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + _LENGTH_EPS) for part in (q, k))
        return q * spec.key_head_dim**-0.5, k, v.unflatten(1, (spec.value_heads, -1))
