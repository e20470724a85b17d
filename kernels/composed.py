"""What does a device do for layers that it has no kernels of its own for? It composes them of the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from membound.kernels import kivi, recurrent, routing
from membound.kernels.base import (
    Activation,
    BlockCopier,
    ChainVerifier,
    DeltaNetVectors,
    Mamba2Vectors,
    PackedWeight,
    RaggedBatch,
)
from membound.kernels.composed_by_head import ComposedByHead
from membound.kernels.kivi import KiviBlocks
from membound.kernels.recurrent import seats_of
from membound.kernels.routing import GroupedLinear, Routing, RoutingRule
from membound.kernels.sight import visible_tokens

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu_squared": lambda x: functional.relu(x).square(),
    "softplus": functional.softplus,
}
CLAMPED_SLOPE = 1.702  # gpt-oss `config.json`: swiglu_alpha


class ComposedKernels(ComposedByHead, ABC):
    """Latents, mixtures and recurrences of `Kernels`, by its attention, its norm and plain PyTorch."""

    activation_dtype: torch.dtype
    kv_dtype: torch.dtype
    emulates_kivi = True
    batch_invariant = False
    keeps_mxfp4 = False
    chain_verifier: ChainVerifier | None = None

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""

    def compilations(self) -> int:
        return 0

    def pack_fp8(
        self, codes: Tensor, scale: Tensor, *, rounds_inputs: bool, whole_step: bool = False
    ) -> PackedWeight | None:
        if rounds_inputs or scale.dim() == 2:
            return None
        return PackedWeight("fp8", codes.view(torch.uint8), scale)

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        if residual is not None:
            residual += x
            x = residual
        return functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)

    def norm_heads(self, x: Tensor, first: int, heads: int, weight: Tensor, eps: float) -> None:
        groups, width = weight.view(-1, weight.shape[-1]).shape
        pieces = x[:, first : first + heads * width]
        if groups == 1 and x.dtype is self.activation_dtype:
            normed = self.rms_norm(pieces.reshape(-1, width), weight.view(-1), eps)
        else:
            apart = pieces.float().view(x.shape[0], -1, groups, width)
            normed = apart * torch.rsqrt(apart.square().mean(-1, keepdim=True) + eps) * weight
        pieces.copy_(normed.view(pieces.shape))

    def glu(self, gate_up: Tensor, activation: Activation, limit: float | None = None) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if limit is None:
            return ACTIVATIONS[activation](gate) * up
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(CLAMPED_SLOPE * gate)

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        return ACTIVATIONS[activation](x)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim=-1)

    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias.to(x.dtype)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def gated(self, x: Tensor, gate: Tensor, *, silu: bool = False) -> Tensor:
        return x * (functional.silu(gate) if silu else torch.sigmoid(gate))

    def attention_with_sinks(
        self,
        q: Tensor,
        k_blocks: Tensor,
        v_blocks: Tensor,
        batch: RaggedBatch,
        scale: float,
        sinks: Tensor,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """In plain PyTorch, because fused kernels keep no sum of weights."""
        _, block_size, kv_heads, _ = k_blocks.shape
        starts, own = batch.query_start.tolist(), sinks.unflatten(0, (kv_heads, -1))[..., None, None]
        out = torch.empty_like(q)
        for i, context in enumerate(batch.context_len.tolist()):
            new = slice(starts[i], starts[i + 1])
            seen = visible_tokens(batch, i, window)  # [queries, context]
            table = batch.block_table[i, : -(-context // block_size)].long()
            k, v = (blocks[table].flatten(0, 1)[:context].float() for blocks in (k_blocks, v_blocks))
            grouped = q[new].float().unflatten(1, (kv_heads, -1))  # [queries, kv_heads, group, head_dim]
            scores = torch.einsum("qhgd,thd->hgqt", grouped, k) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen, -torch.inf)
            with_sink = torch.cat([scores, own.expand(*scores.shape[:-1], 1)], dim=-1)
            shares = with_sink.softmax(-1)[..., :-1]  # [kv_heads, group, queries, context]
            out[new] = torch.einsum("hgqt,thd->qhgd", shares, v).flatten(1, 2).to(out.dtype)
        return out.flatten(1)

    def latent_rope_and_store(
        self,
        q: Tensor,
        latents: Tensor,
        norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        batch: RaggedBatch,
        blocks: Tensor,
    ) -> Tensor:
        rank, rope = norm.shape[0], 2 * cos.shape[1]
        latent, key = latents.split([rank, rope], dim=-1)
        nope, turned = q.split([q.shape[-1] - rope, rope], dim=-1)
        c, s = cos[batch.positions].unsqueeze(1), sin[batch.positions].unsqueeze(1)  # [tokens, 1, rope / 2]
        key = rotated(key.unsqueeze(1), c, s).squeeze(1)
        kept = torch.cat([self.rms_norm(latent.contiguous(), norm, eps), key], dim=-1)
        size = blocks.shape[1]
        blocks[batch.slots // size, batch.slots % size, 0] = kept.to(blocks.dtype)
        return torch.cat([nope, rotated(turned, c, s)], dim=-1)

    def latent_attention(self, q: Tensor, blocks: Tensor, batch: RaggedBatch, scale: float, rank: int) -> Tensor:
        seen = self.attention(q.contiguous(), blocks, blocks, batch, scale)
        return seen.unflatten(1, (q.shape[1], -1))[..., :rank]  # of the latents, not of the keys

    def unpacked_attention(
        self, q: Tensor, unpacked: Tensor, keys: Tensor, new: Sequence[int], contexts: Sequence[int], scale: float
    ) -> Tensor:
        heads, own = q.shape[1], q.shape[2] - keys.shape[1]
        parts = zip(q.split(list(new)), unpacked.split(list(contexts)), keys.split(list(contexts)), strict=True)
        out = [
            _causal(
                part,
                torch.cat([of_heads[..., :own], shared.unsqueeze(1).expand(-1, heads, -1)], dim=-1),
                of_heads[..., own:],
                scale,
            )
            for part, of_heads, shared in parts
        ]
        return torch.cat(out)

    def heads_linear(self, x: Tensor, weight: Tensor, tail: int = 0) -> Tensor:
        k = weight.shape[2]
        multiplied, kept = x[..., :k].transpose(0, 1).to(weight.dtype), x[..., k : k + tail]
        out = torch.bmm(multiplied, weight.transpose(1, 2)).transpose(0, 1).to(x.dtype)
        return torch.cat([out, kept], dim=-1) if tail else out

    def block_copier(self, pools: Sequence[Tensor]) -> BlockCopier:
        def copy(pairs: Sequence[tuple[int, int]]) -> None:
            sources, targets = ([pair[side] for pair in pairs] for side in range(2))
            for pool in pools:
                pool[targets] = pool[sources]

        return copy

    def kivi_make_room(self, kv: KiviBlocks, batch: RaggedBatch) -> None:
        kivi.make_room(kv, batch)

    def attention_kivi(
        self,
        q: Tensor,
        kv: KiviBlocks,
        batch: RaggedBatch,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        contexts, seats, size = batch.context_len.tolist(), seats_of(batch).tolist(), kv.block_size
        counts = [-(-context // size) for context in contexts]
        k, v = (
            torch.zeros(sum(counts), size, *kv.recent_keys.shape[2:], dtype=self.kv_dtype, device=q.device)
            for _ in range(2)
        )
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=q.device)
        for i, (seat, context, count) in enumerate(zip(seats, contexts, counts, strict=True)):
            first = sum(counts[:i])
            table[i, :count] = torch.arange(first, first + count)
            keys, values = kv.tokens(batch.block_table[i], seat, context)
            k[first : first + count].flatten(0, 1)[:context] = keys.to(k.dtype)
            v[first : first + count].flatten(0, 1)[:context] = values.to(v.dtype)
        unpacked = replace(batch, block_table=table)
        return self.attention(q, k, v, unpacked, scale, window=window, softcap=softcap)

    def grouped(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor] | None = None) -> GroupedLinear | None:
        return None

    def route(
        self, logits: Tensor, top_k: int, rule: RoutingRule, bias: Tensor | None = None, slots: Tensor | None = None
    ) -> Routing:
        return routing.route(logits, top_k, rule, bias)

    def combine(self, slots: Tensor, chosen: Routing) -> Tensor:
        return routing.combined(slots, chosen)

    def count_routed(self, chosen: Routing, tokens: Tensor, load: Tensor, probability: Tensor) -> None:
        assert chosen.probabilities is not None, "a router that is counted says them"
        tokens += chosen.probabilities.shape[0]
        load += chosen.counts
        probability += chosen.probabilities.double().sum(0)

    def causal_convolution(
        self, state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, batch: RaggedBatch
    ) -> Tensor:
        return recurrent.causal_convolution(state, x, weight, bias, batch)

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
        return recurrent.mamba2_scan(state, x, dt, b, c, z, vectors, batch)

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
        return recurrent.mamba1_scan(state, x, dt, b, c, z, a, d, batch)

    def rwkv6_scan(
        self, state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, u: Tensor, batch: RaggedBatch
    ) -> Tensor:
        return recurrent.rwkv6_scan(state, r, w, k, v, u, batch)

    def delta_scan(
        self, state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, batch: RaggedBatch
    ) -> Tensor:
        return recurrent.delta_scan(state, r, w, k, v, a, b, batch)

    def gated_delta(
        self, state: Tensor, mixed: Tensor, ba: Tensor, vectors: DeltaNetVectors, batch: RaggedBatch, key_heads: int
    ) -> Tensor:
        b, a = ba.float().chunk(2, dim=-1)  # [tokens, heads]
        beta, kept = b.sigmoid(), (vectors.a * functional.softplus(a + vectors.dt_bias)).exp()
        q, k, v = recurrent.delta_net_heads(mixed, key_heads, *state.shape[1:])
        # What k finds in the state is removed from it at the rate beta: S = g S + k^T beta (v - g k S).
        gate = kept[..., None].expand_as(k).contiguous()
        removed = -(beta * kept)[..., None] * k
        return self.delta_scan(state, q, gate, k, beta[..., None] * v, k, removed, batch)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of the newest tokens q [queries, heads, D] over k and v [context, heads, ...] of one sequence."""
    context = k.shape[0]
    place = torch.arange(context, device=q.device)
    seen = place <= place[context - q.shape[0] :, None]  # [queries, context]
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)[0].transpose(0, 1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, D], whose pairs are (i, i + D / 2), turned by [tokens, 1, D / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
