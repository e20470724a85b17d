"""How does a state-space layer mix tokens (Mamba-2, Mamba)?

Mamba-2: Dao and Gu 2024, arXiv 2405.21060; h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t^T, y_t = h_t C_t + D x_t for each
head. Mamba: Gu and Dao 2023, arXiv 2312.00752, where every channel has its own A and dt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from membound.kernels.base import Kernels, RaggedBatch
from membound.roofline.models.recurrent import Mamba1, Mamba2
from membound.runtime.blocks.base import LayerCache
from membound.runtime.blocks.states import SeatStates, segments, short_convolution
from membound.runtime.linear import Linear

CHUNK_TOKENS = 64


class Mamba2Mixer:
    """A Mamba-2 layer: one token at a time by the recurrence, several by chunks in its matrix form (SSD)."""

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
        self.eps = eps
        self.device = device

    def __call__(self, x: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        assert isinstance(cache, SeatStates)
        spec, weights = self.spec, self.weights
        cache.begin(batch)
        widths = [spec.d_inner, spec.conv_channels, spec.heads]
        z, inputs, dt = self.in_proj(x).float().split(widths, dim=-1)
        dt = functional.softplus(dt + weights["dt_bias"])  # [tokens, heads]
        y = torch.empty_like(z)
        for segment in segments(batch):
            before = cache.parts["conv"][segment.seats]
            mixed, after = short_convolution(inputs[segment.rows], before, weights["conv"], weights["conv_bias"])
            cache.parts["conv"][segment.seats] = after
            h = cache.parts["state"][segment.seats]  # [sequences, heads, head_dim, d_state]
            out, h = self._scan(functional.silu(mixed), dt[segment.rows], h)
            cache.parts["state"][segment.seats] = h
            y[segment.rows] = out
        y = y * functional.silu(z)
        if spec.gated_norm:
            grouped = y.unflatten(1, (spec.groups, -1))
            y = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)).flatten(1)
            y = y * weights["gated_norm"]
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

    def _scan(self, mixed: Tensor, dt: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """y [sequences, tokens, d_inner] and the state after them, of x, B and C [sequences, tokens, channels]."""
        spec = self.spec
        x, b, c = mixed.split([spec.d_inner, *2 * (spec.groups * spec.d_state,)], dim=-1)
        x = x.unflatten(-1, (spec.heads, spec.head_dim)).transpose(1, 2)  # [sequences, heads, tokens, head_dim]
        each = spec.heads // spec.groups
        b, c = (part.unflatten(-1, (spec.groups, -1)).transpose(1, 2).repeat_interleave(each, 1) for part in (b, c))
        dt = dt.transpose(1, 2)  # [sequences, heads, tokens]
        decay = dt * self.weights["a"][:, None]  # logarithm of the share that is kept
        scaled, outputs = x * dt[..., None], []
        for start in range(0, x.shape[2], CHUNK_TOKENS):
            piece = slice(start, start + CHUNK_TOKENS)
            y, h = _chunk(scaled[:, :, piece], decay[..., piece], b[:, :, piece], c[:, :, piece], h)
            outputs.append(y)
        y = torch.cat(outputs, dim=2) + x * self.weights["d"][:, None, None]
        return y.transpose(1, 2).flatten(2), h


def _chunk(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of the recurrence as matrix products (arXiv 2405.21060, section 6).

    x [S, heads, T, head_dim] is scaled by dt; decay [S, heads, T]; b, c [S, heads, T, d_state]; h [S, heads, head_dim,
    d_state] is the state before. Returns y as x, and the state after.
    """
    total = decay.cumsum(-1)  # [S, heads, T]
    between = total[..., :, None] - total[..., None, :]  # [S, heads, to, from]
    causal = torch.ones(between.shape[-2:], dtype=torch.bool, device=x.device).tril()
    kept = between.masked_fill(~causal, -torch.inf).exp()
    y = (c @ b.transpose(-1, -2) * kept) @ x + (c * total.exp()[..., None]) @ h.transpose(-1, -2)
    left = (total[..., -1:] - total).exp()[..., None]  # [S, heads, T, 1]
    return y, h * total[..., -1:].exp()[..., None] + (x * left).transpose(-1, -2) @ b


class Mamba1Mixer:
    """A Mamba layer, one token after the other."""

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
        kind = self.kernels.activation_dtype
        cache.begin(batch)
        inputs, z = linears["in_proj"](x).float().chunk(2, dim=-1)
        mixed = torch.empty_like(inputs)
        for segment in segments(batch):
            before = cache.parts["conv"][segment.seats]
            y, after = short_convolution(inputs[segment.rows], before, weights["conv"], weights["conv_bias"])
            cache.parts["conv"][segment.seats] = after
            mixed[segment.rows] = functional.silu(y)
        widths = [spec.dt_rank, spec.d_state, spec.d_state]
        parts = linears["x_proj"](mixed.to(kind)).float().split(widths, dim=-1)
        if spec.inner_norms:
            parts = tuple(self._normed(part, name) for part, name in zip(parts, ["dt", "b", "c"], strict=True))
        rank, b, c = parts
        dt = functional.softplus(linears["dt_proj"](rank.to(kind).contiguous()).float() + weights["dt_bias"])
        out = torch.empty_like(mixed)
        for segment in segments(batch):
            h = cache.parts["state"][segment.seats]  # [sequences, d_inner, d_state]
            for at in segment.rows.unbind(1):
                kept = (dt[at, :, None] * weights["a"]).exp()
                h = h * kept + (dt[at] * mixed[at])[..., None] * b[at, None, :]
                out[at] = (h * c[at, None, :]).sum(-1)
            cache.parts["state"][segment.seats] = h
        y = (out + mixed * weights["d"]) * functional.silu(z)
        return linears["out_proj"](y.to(kind))

    def new_cache(self, num_blocks: int, block_size: int, seats: int) -> SeatStates:
        inner = self.spec.d_inner
        shapes = {"conv": (self.spec.conv_width - 1, inner), "state": (inner, self.spec.d_state)}
        return SeatStates.zeroed(seats, self.device, **shapes)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        return iter(self._linears.items())

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weights[f"{name}_norm"]
