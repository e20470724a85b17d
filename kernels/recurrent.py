"""What do the recurrences of layers with a state mean, over a ragged batch? Plain PyTorch, in fp32.

A state is [seats, ...] and changes in place; sequence i has `batch.seats[i]`, or its number where the batch names none,
and begins with zeros where its first new token is its first of all. Inputs are [tokens, ...], in whatever type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from membound.kernels.base import Mamba2Vectors, RaggedBatch

CHUNK_TOKENS = 64
LENGTH_EPS = 1e-6  # of q and k in a gated DeltaNet


@dataclass(frozen=True)
class Segment:
    """Sequences that bring equally many tokens: `rows` [sequences, tokens] of the batch, `seats` [sequences].

    Those that are `fresh` [sequences] have no token before.
    """

    rows: Tensor
    seats: Tensor
    fresh: Tensor

    def before(self, state: Tensor) -> Tensor:
        """What `state` [seats, ...] holds for them before this step: [sequences, ...]."""
        kept = state[self.seats]
        return torch.where(self.fresh.view(-1, *[1] * (kept.dim() - 1)), 0, kept)


def seats_of(batch: RaggedBatch) -> Tensor:
    """The seat of each sequence; in their order where the batch names none."""
    if batch.seats is not None:
        return batch.seats
    return torch.arange(batch.num_sequences, device=batch.positions.device)


def fresh_of(batch: RaggedBatch) -> Tensor:
    """Which sequences [sequences] begin with this step."""
    return batch.positions[batch.query_start[:-1].long()] == 0


def segments(batch: RaggedBatch) -> Iterator[Segment]:
    """A batch in pieces: all sequences of as many tokens at once."""
    seats, fresh = seats_of(batch), fresh_of(batch)
    if batch.most_queries == 1:
        yield Segment(torch.arange(batch.num_tokens, device=seats.device)[:, None], seats, fresh)
        return
    starts = batch.query_start.tolist()
    by_length: dict[int, list[int]] = {}
    for i in range(batch.num_sequences):
        by_length.setdefault(starts[i + 1] - starts[i], []).append(i)
    for length, sequences in by_length.items():
        if length:
            first = torch.tensor([starts[i] for i in sequences], device=seats.device)
            rows = first[:, None] + torch.arange(length, device=seats.device)
            yield Segment(rows, seats[sequences], fresh[sequences])


def causal_convolution(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, batch: RaggedBatch) -> Tensor:
    """SiLU of a causal convolution of each channel: see `Kernels.causal_convolution`."""
    x = x.float()
    out, width = torch.empty_like(x), weight.shape[1]
    for segment in segments(batch):
        tokens = segment.rows.shape[1]
        whole = torch.cat([segment.before(state), x[segment.rows]], dim=1)  # [sequences, width - 1 + tokens, channels]
        y = sum(whole[:, i : i + tokens] * weight[:, i] for i in range(width))
        assert isinstance(y, Tensor)
        out[segment.rows] = functional.silu(y if bias is None else y + bias)
        state[segment.seats] = whole[:, tokens:]
    return out


def mamba2_scan(
    state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, z: Tensor, vectors: Mamba2Vectors, batch: RaggedBatch
) -> Tensor:
    """See `Kernels.mamba2_scan`; several tokens of a sequence by chunks in the matrix form (SSD)."""
    x, z = x.float(), z.float()
    step = functional.softplus(dt.float() + vectors.dt_bias)  # [tokens, heads]
    each = x.shape[1] // b.shape[1]
    out = torch.empty_like(x)
    for segment in segments(batch):
        rows, h = segment.rows, segment.before(state)
        inputs = x[rows].transpose(1, 2)  # [sequences, heads, tokens, head_dim]
        keys, queries = (part[rows].float().transpose(1, 2).repeat_interleave(each, 1) for part in (b, c))
        steps = step[rows].transpose(1, 2)  # [sequences, heads, tokens]
        decay = steps * vectors.a[:, None]  # logarithm of the share that is kept
        scaled, outputs = inputs * steps[..., None], []
        for start in range(0, rows.shape[1], CHUNK_TOKENS):
            piece = slice(start, start + CHUNK_TOKENS)
            y, h = _chunk(scaled[:, :, piece], decay[..., piece], keys[:, :, piece], queries[:, :, piece], h)
            outputs.append(y)
        state[segment.seats] = h
        out[rows] = (torch.cat(outputs, dim=2) + inputs * vectors.d[:, None, None]).transpose(1, 2)
    return out * functional.silu(z)


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


def mamba1_scan(
    state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, z: Tensor, a: Tensor, d: Tensor, batch: RaggedBatch
) -> Tensor:
    """See `Kernels.mamba1_scan`."""
    x, dt, b, c = (part.float() for part in (x, dt, b, c))
    out = torch.empty_like(x)
    for segment in segments(batch):
        h = segment.before(state)  # [sequences, d_inner, d_state]
        for at in segment.rows.unbind(1):
            h = h * (dt[at, :, None] * a).exp() + (dt[at] * x[at])[..., None] * b[at, None, :]
            out[at] = (h * c[at, None, :]).sum(-1)
        state[segment.seats] = h
    return (out + x * d) * functional.silu(z.float())


def rwkv6_scan(state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, u: Tensor, batch: RaggedBatch) -> Tensor:
    """See `Kernels.rwkv6_scan`."""
    out = torch.empty_like(v)
    for segment in segments(batch):
        s = segment.before(state)  # [sequences, heads, key, value]
        for at in segment.rows.unbind(1):
            new = k[at][..., None] * v[at][..., None, :]
            out[at] = (r[at][..., None] * (u[..., None] * new + s)).sum(-2)
            s = w[at][..., None] * s + new
        state[segment.seats] = s
    return out


def delta_scan(
    state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, batch: RaggedBatch
) -> Tensor:
    """See `Kernels.delta_scan`."""
    out = torch.empty_like(v)
    for segment in segments(batch):
        s = segment.before(state)  # [sequences, heads, key, value]
        for at in segment.rows.unbind(1):
            found = (a[at][..., None] * s).sum(-2, keepdim=True)  # [sequences, heads, 1, value]
            s = w[at][..., None] * s + b[at][..., None] * found + k[at][..., None] * v[at][..., None, :]
            out[at] = (r[at][..., None] * s).sum(-2)
        state[segment.seats] = s
    return out


def delta_net_heads(mixed: Tensor, key_heads: int, heads: int, key: int, value: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [tokens, heads, key] of length 1 (q then scaled), and v [tokens, heads, value] of a gated DeltaNet."""
    keys = key_heads * key
    q, k, v = mixed.split([keys, keys, heads * value], dim=-1)
    q, k = (part.unflatten(1, (key_heads, -1)).repeat_interleave(heads // key_heads, dim=1) for part in (q, k))
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + LENGTH_EPS) for part in (q, k))
    return q * key**-0.5, k, v.unflatten(1, (heads, -1))
