"""How does a layer attend to a cache of latent vectors (MLA)?

DeepSeek-V2, arXiv 2405.04434, section 2.1: a token keeps one latent, from which K and V of every head are unpacked, and
one turned key that all heads share. Absorbed, the unpacking matrices are applied to q and to the output instead, and
attention runs on the latents as if they were one KV head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from membound.kernels.base import Kernels, RaggedBatch
from membound.roofline.models import LatentAttention
from membound.runtime.blocks.base import LayerCache
from membound.runtime.blocks.norms import Norm, RmsNorm
from membound.runtime.kv.latent import LatentKv
from membound.runtime.linear import Linear
from membound.runtime.rope import RopeTables

# Up to as many new tokens of a sequence, one and its drafts, unpacking the whole context costs more than it saves.
FEW_QUERIES = 16
MOST_UNPACKED = 8192  # tokens at once: of DeepSeek-V3's 128 heads K and V are half a gigabyte in 16 bits


@dataclass(frozen=True)
class LatentLinears:
    """The matrices of a layer; with a compressed q `inputs` makes it and the latent at once, and `q` unpacks it.

    Without, `q` and `kv_a` both read the hidden state.
    """

    kv_b: Linear
    o: Linear
    q: Linear
    kv_a: Linear | None = None
    inputs: Linear | None = None
    q_norm: Norm | None = None

    def named(self) -> Iterator[tuple[str, Linear]]:
        """By the names of `roofline.models`."""
        if self.inputs is not None:
            yield "q_a_kv_a", self.inputs
            yield "q_b", self.q
        else:
            assert self.kv_a is not None, "the latent comes from somewhere"
            yield "q", self.q
            yield "kv_a", self.kv_a
        yield "kv_b", self.kv_b
        yield "o", self.o


class LatentMixer:
    """Latent attention: sequences with few new tokens on the latents (if `absorbed`), others with K and V unpacked.

    The absorbed halves are what `kv_b` does, read back from it once, so that they follow its format; they stay in 16
    bits as in other engines.
    """

    def __init__(
        self,
        spec: LatentAttention,
        kernels: Kernels,
        rope: RopeTables,
        linears: LatentLinears,
        latent_norm: RmsNorm,
        scale: float,
        *,
        absorbed: bool = True,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.kernels = kernels
        self.rope = rope
        self._linears = linears
        self.latent_norm = latent_norm
        self.absorbed = absorbed
        self.scale = scale
        self.device = device

    @cached_property
    def _absorbed_halves(self) -> tuple[Tensor, Tensor]:
        """What turns q into the latents' space, [heads, rank, nope], and what they attend to into v, [heads, v, rank].

        Read back when first needed, so that whoever observes `kv_b` while text is read sees its inputs alone.
        """
        spec, kernels = self.spec, self.kernels
        eye = torch.eye(spec.kv_lora_rank, dtype=kernels.activation_dtype, device=self.device)
        unpack = self._linears.kv_b(eye).unflatten(1, (spec.heads, -1)).permute(1, 2, 0)  # [heads, nope + v, rank]
        kept = torch.float32 if kernels.kv_dtype == torch.float32 else torch.bfloat16
        k, v = unpack.to(kept).split([spec.qk_nope_head_dim, spec.v_head_dim], dim=1)
        return k.transpose(1, 2).contiguous(), v.contiguous()

    def __call__(self, x: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        assert isinstance(cache, LatentKv)
        spec, parts = self.spec, self._linears
        if parts.inputs is not None and parts.q_norm is not None:
            compressed, latents = parts.inputs(x).split([spec.q_lora_rank or 0, spec.kv_elements_per_token], dim=-1)
            q = parts.q(parts.q_norm(compressed))
        else:
            assert parts.kv_a is not None, "the latent comes from somewhere"
            q, latents = parts.q(x), parts.kv_a(x)
        norm, rope = self.latent_norm, self.rope
        q = self.kernels.latent_rope_and_store(
            q.unflatten(1, (spec.heads, -1)), latents, norm.weight, norm.eps, rope.cos, rope.sin, batch, cache.blocks
        )  # [tokens, heads, nope + rope]
        return parts.o(self._attend(q, batch, cache).flatten(1))

    def new_cache(self, num_blocks: int, block_size: int, seats: int) -> LatentKv:
        self.rope.reach(num_blocks * block_size)
        width, dtype = self.spec.kv_elements_per_token, self.kernels.kv_dtype
        return LatentKv.zeroed(width, num_blocks, block_size, dtype, self.device)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        return self._linears.named()

    def stays_on_latents(self, batch: RaggedBatch) -> bool:
        """Whether no sequence's latents are unpacked in this step."""
        few = batch.most_queries is not None and batch.most_queries <= FEW_QUERIES
        return batch.tree is not None or (self.absorbed and few)

    def _attend(self, q: Tensor, batch: RaggedBatch, cache: LatentKv) -> Tensor:
        """[tokens, heads, v_head_dim]."""
        if self.stays_on_latents(batch):
            return self._on_latents(q, batch, cache)
        starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        few = [i for i, length in enumerate(lengths) if self.absorbed and 0 < length <= FEW_QUERIES]
        out = q.new_empty(q.shape[0], self.spec.heads, self.spec.v_head_dim)
        if few:
            rows = torch.tensor([t for i in few for t in range(starts[i], starts[i + 1])], device=q.device)
            out[rows] = self._on_latents(q[rows], _part(batch, few, [lengths[i] for i in few], rows), cache)
        many = [i for i, length in enumerate(lengths) if length and i not in few]
        for group in _together(many, contexts):
            new, kept = [lengths[i] for i in group], [contexts[i] for i in group]
            latents = torch.cat([cache.of_sequence(batch, i, contexts[i]) for i in group]).to(q.dtype)
            queries = torch.cat([q[starts[i] : starts[i + 1]] for i in group])
            parts = self._unpacked(queries, latents, new, kept).split(new)
            for i, part in zip(group, parts, strict=True):
                out[starts[i] : starts[i + 1]] = part
        return out

    def _on_latents(self, q: Tensor, batch: RaggedBatch, cache: LatentKv) -> Tensor:
        spec, kernels, (q_absorb, v_absorb) = self.spec, self.kernels, self._absorbed_halves
        q = kernels.heads_linear(q, q_absorb, tail=spec.qk_rope_head_dim)  # [tokens, heads, rank + rope]
        seen = kernels.latent_attention(q, cache.blocks, batch, self.scale, spec.kv_lora_rank)
        return kernels.heads_linear(seen, v_absorb)

    def _unpacked(self, q: Tensor, latents: Tensor, new: list[int], contexts: list[int]) -> Tensor:
        """The `new` tokens q [tokens, heads, nope + rope] of some sequences over K and V of every head.

        `latents` [kept, rank + rope] are those of their `contexts`, one sequence's behind the other's.
        """
        latent, keys = latents.split([self.spec.kv_lora_rank, self.spec.qk_rope_head_dim], dim=-1)
        unpacked = self._linears.kv_b(latent.contiguous()).unflatten(1, (self.spec.heads, -1))
        return self.kernels.unpacked_attention(q, unpacked, keys, new, contexts, self.scale)


def _together(sequences: list[int], contexts: list[int]) -> Iterator[list[int]]:
    """The sequences in groups of up to MOST_UNPACKED tokens, or of one that has more."""
    group: list[int] = []
    for i in sequences:
        if group and sum(contexts[j] for j in group) + contexts[i] > MOST_UNPACKED:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _part(batch: RaggedBatch, sequences: list[int], lengths: list[int], rows: Tensor) -> RaggedBatch:
    """Some sequences of a batch, which bring `lengths` tokens each, those in `rows` [tokens]."""
    return replace(
        batch,
        positions=batch.positions[rows],
        slots=batch.slots[rows],
        query_start=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=rows.device),
        context_len=batch.context_len[sequences],
        block_table=batch.block_table[sequences],
        most_queries=max(lengths),
        seats=None if batch.seats is None else batch.seats[sequences],
    )
