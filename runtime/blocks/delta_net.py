"""How does linear attention with the gated delta rule mix tokens?

Yang et al. 2024, Gated Delta Networks, arXiv 2412.06464, section 3.1, as Qwen3-Next has it: for each value head
S = g S, then S += k (beta (v - k S))^T, y = q S, with q and k of length 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from membound.kernels.base import DeltaNetVectors, Kernels, RaggedBatch
from membound.roofline.models.recurrent import GatedDeltaNet
from membound.runtime.blocks.base import LayerCache
from membound.runtime.blocks.states import SeatStates
from membound.runtime.linear import Linear


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
        self.vectors = DeltaNetVectors(weights["a"].float(), weights["dt_bias"].float())
        self.eps = eps
        self.device = device

    def __call__(self, x: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        assert isinstance(cache, SeatStates)
        spec, weights, kernels, heads = self.spec, self.weights, self.kernels, self.spec.key_heads
        width = spec.value_heads * spec.value_head_dim
        qkv, z = self._linears["qkvz"](x).split([spec.conv_channels, width], dim=-1)
        ba = self._linears["ba"](x)
        conv, vectors = weights["conv"], self.vectors
        mixed = cache.advance("conv", batch, (qkv,), lambda s, x, at: kernels.causal_convolution(s, *x, conv, None, at))
        scanned = mixed, ba
        out = cache.advance("state", batch, scanned, lambda s, x, at: kernels.gated_delta(s, *x, vectors, at, heads))
        out = out.flatten(1)
        self.kernels.norm_heads(out, 0, spec.value_heads, weights["gated_norm"], self.eps)
        y = self.kernels.gated(out, z.to(out.dtype), silu=True)
        return self._linears["o"](y.to(self.kernels.activation_dtype))

    def new_cache(self, num_blocks: int, block_size: int, seats: int) -> SeatStates:
        spec = self.spec
        state = (spec.value_heads, spec.key_head_dim, spec.value_head_dim)
        return SeatStates.zeroed(seats, self.device, conv=(spec.conv_width - 1, spec.conv_channels), state=state)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        return iter(self._linears.items())
