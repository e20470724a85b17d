"""How does a state-space layer mix tokens (Mamba-2, Mamba)?

Mamba-2: Dao and Gu 2024, arXiv 2405.21060; h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t^T, y_t = h_t C_t + D x_t for each
head. Mamba: Gu and Dao 2023, arXiv 2312.00752, where every channel has its own A and dt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from membound.kernels.base import Kernels, Mamba2Vectors, RaggedBatch
from membound.roofline.models.recurrent import Mamba1, Mamba2
from membound.runtime.blocks.base import LayerCache
from membound.runtime.blocks.states import SeatStates
from membound.runtime.linear import Linear


class Mamba2Mixer:
    """A Mamba-2 layer."""

    def __init__(
        self,
        spec: Mamba2,
        kernels: Kernels,
        in_proj: Linear,
        out_proj: Linear,
        weights: Mapping[str, Tensor],
        eps: float,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.kernels = kernels
        self.in_proj = in_proj
        self.out_proj = out_proj
        self.weights = weights
        self.vectors = Mamba2Vectors(*(weights[name].float() for name in ("dt_bias", "a", "d")))
        self.eps = eps
        self.device = device

    def __call__(self, x: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        assert isinstance(cache, SeatStates)
        spec, weights, kernels = self.spec, self.weights, self.kernels
        widths = [spec.d_inner, spec.conv_channels, spec.heads]
        z, inputs, dt = self.in_proj(x).split(widths, dim=-1)
        conv = weights["conv"], weights["conv_bias"]
        mixed = cache.advance("conv", batch, (inputs,), lambda s, x, at: kernels.causal_convolution(s, *x, *conv, at))
        inner, b, c = mixed.split([spec.d_inner, *2 * (spec.groups * spec.d_state,)], dim=-1)
        inner, z = (_parted(rows, spec.heads) for rows in (inner, z))
        b, c = (_parted(rows, spec.groups) for rows in (b, c))
        scanned = inner, dt, b, c, z
        y = cache.advance("state", batch, scanned, lambda s, x, at: kernels.mamba2_scan(s, *x, self.vectors, at))
        y = y.flatten(1)
        if spec.gated_norm:
            self.kernels.norm_heads(y, 0, spec.groups, weights["gated_norm"].view(spec.groups, -1), self.eps)
        return self.out_proj(y.to(self.kernels.activation_dtype))

    def new_cache(self, num_blocks: int, block_size: int, seats: int) -> SeatStates:
        spec = self.spec
        return SeatStates.zeroed(
            seats,
            self.device,
            conv=(spec.conv_width - 1, spec.conv_channels),
            state=(spec.heads, spec.head_dim, spec.d_state),
        )

    def linears(self) -> Iterator[tuple[str, Linear]]:
        yield "in_proj", self.in_proj
        yield "out_proj", self.out_proj


class Mamba1Mixer:
    """A Mamba layer."""

    def __init__(
        self,
        spec: Mamba1,
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
        spec, weights, linears = self.spec, self.weights, self._linears
        kind, kernels = self.kernels.activation_dtype, self.kernels
        inputs, z = linears["in_proj"](x).chunk(2, dim=-1)
        conv, fixed = (weights["conv"], weights["conv_bias"]), (weights["a"], weights["d"])
        mixed = cache.advance("conv", batch, (inputs,), lambda s, x, at: kernels.causal_convolution(s, *x, *conv, at))
        projected = linears["x_proj"](mixed.to(kind)).float()
        widths = [spec.dt_rank, spec.d_state, spec.d_state]
        if spec.inner_norms:
            for first, name in zip((0, spec.dt_rank, spec.dt_rank + spec.d_state), ("dt", "b", "c"), strict=True):
                self.kernels.norm_heads(projected, first, 1, weights[f"{name}_norm"], self.eps)
        rank, b, c = projected.split(widths, dim=-1)
        dt = linears["dt_proj"](self.kernels.joined([rank.to(kind)])).float()
        dt = self.kernels.activated(self.kernels.add_bias(dt, weights["dt_bias"]), "softplus")
        scanned = mixed, dt, b, c, z
        y = cache.advance("state", batch, scanned, lambda s, x, at: kernels.mamba1_scan(s, *x, *fixed, at))
        return linears["out_proj"](y.to(kind))

    def new_cache(self, num_blocks: int, block_size: int, seats: int) -> SeatStates:
        inner = self.spec.d_inner
        shapes = {"conv": (self.spec.conv_width - 1, inner), "state": (inner, self.spec.d_state)}
        return SeatStates.zeroed(seats, self.device, **shapes)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        return iter(self._linears.items())


def _parted(rows: Tensor, parts: int) -> Tensor:
    """Rows [tokens, parts * width] as [tokens, parts, width], as far apart as they were.

    `unflatten` forgets that where there is one row, and what was recorded with one is played for several.
    """
    width = rows.shape[1] // parts
    return rows.as_strided((rows.shape[0], parts, width), (rows.stride(0), width, 1))
