"""How does a decoder-only model turn a ragged batch of tokens into logits?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from membound.kernels.base import Kernels, RaggedBatch, WeightFormat
from membound.roofline.models import ModelSpec
from membound.runtime.blocks.attention import GroupedAttention, NewStore
from membound.runtime.blocks.base import LayerCache
from membound.runtime.blocks.build import BlockBuilder, plain_store
from membound.runtime.linear import Linear
from membound.runtime.recipe import FormatRecipe, Recipe
from membound.runtime.rope import RopeTables
from membound.runtime.weights import Weights, rope_frequencies

KvCache = Sequence[LayerCache]


class Hidden(NamedTuple):
    """The hidden states of a step's tokens after some layers, both [tokens, hidden]: the sum, and its final norm."""

    residual: Tensor
    normed: Tensor


class Decoder:
    """A stack of blocks over `kernels`, whose matrices are what `recipe` makes of `weights`; the embedding is bf16.

    It has as many layers as `weights`, which may be fewer than `spec` names. `new_store` makes the KV store of an
    attention layer; without it K and V lie as the kernels keep them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        kernels: Kernels,
        recipe: Recipe | WeightFormat = "bf16",
        new_store: NewStore | None = None,
    ) -> None:
        if isinstance(recipe, str):
            recipe = FormatRecipe(kernels, recipe)
        weights = recipe.prepare(spec, weights)
        self.spec = spec
        self.kernels = kernels
        self.device = weights.embed.device
        self.embed = weights.embed
        rope = _rope_tables(spec, weights)
        builder = BlockBuilder(spec, kernels, rope, recipe.linear, new_store or plain_store(kernels, self.device))
        pairs = zip(spec.stack, weights.layers, strict=False)
        self.blocks = [builder.build(index, layer, tensors) for index, (layer, tensors) in enumerate(pairs)]
        self.final_norm = weights.final_norm
        self.lm_head = recipe.linear("lm_head", weights.lm_head)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Every matrix by its name, such as `layers.3.qkv`, and `lm_head`."""
        for index, block in enumerate(self.blocks):
            for part, linear in block.linears():
                yield f"layers.{index}.{part}", linear
        yield "lm_head", self.lm_head

    def storing(self, new_store: NewStore) -> Decoder:
        """The same weights over KV stores of another kind, where a layer attends; recurrent states stay as they are."""
        other = copy(self)
        other.blocks = [
            replace(block, mixer=block.mixer.storing(new_store))
            if isinstance(block.mixer, GroupedAttention)
            else block
            for block in self.blocks
        ]
        return other

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one step reads: all but the embedding table, of which it reads a row a token."""
        norms = [norm for block in self.blocks for norm in (block.mixer_norm, block.ffn_norm) if norm is not None]
        return sum(linear.nbytes for _, linear in self.linears()) + sum(n.nbytes for n in [*norms, self.final_norm])

    @property
    def emulated(self) -> bool:
        """Whether the time of a step means nothing, because a matrix is multiplied in another format than its own."""
        return any(linear.emulated for _, linear in self.linears())

    def new_cache(self, num_blocks: int, block_size: int, seats: int = 1) -> KvCache:
        """An empty cache for every layer: blocks of tokens, and what is kept for each of `seats` sequences."""
        return [block.mixer.new_cache(num_blocks, block_size, seats) for block in self.blocks if block.mixer]

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, batch: RaggedBatch, cache: KvCache, logits_rows: Tensor) -> Tensor:
        """Logits [rows, vocab] in fp32 at the tokens `logits_rows` [rows] of `token_ids` [tokens].

        The tokens are added to `cache` on the way.
        """
        return self.logits(self.hidden(token_ids, batch, cache).normed[logits_rows])

    @torch.inference_mode()
    def hidden(self, token_ids: Tensor, batch: RaggedBatch, cache: KvCache, layers: int | None = None) -> Hidden:
        """The hidden states of `token_ids` [tokens] after the first `layers` layers, or all of them."""
        return self.continued(self.embed[token_ids].to(self.kernels.activation_dtype), batch, cache, layers)

    @torch.inference_mode()
    def continued(self, residual: Tensor, batch: RaggedBatch, cache: KvCache, layers: int | None = None) -> Hidden:
        """The same of tokens whose states before the first layer are `residual` [tokens, hidden], which changes."""
        eps = self.spec.norm_eps
        caches = iter(cache)
        added: Tensor | None = None  # what the part before computed, not yet in the residual
        for block in self.blocks[:layers]:
            if block.mixer is not None and block.mixer_norm is not None:
                x = self._norm(added, residual, block.mixer_norm, eps)
                added = block.mixer(x, batch, next(caches))
            if block.ffn is not None and block.ffn_norm is not None:
                x = self._norm(added, residual, block.ffn_norm, eps)
                added = block.ffn(x)
        return Hidden(residual, self._norm(added, residual, self.final_norm, eps))

    @torch.inference_mode()
    def logits(self, normed: Tensor) -> Tensor:
        """Logits [rows, vocab] in fp32 of hidden states [rows, hidden] that are normed."""
        return self.lm_head(normed).float()

    def _norm(self, added: Tensor | None, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Adds the part before into `residual`, and norms the sum."""
        if added is None:
            return self.kernels.rms_norm(residual, norm, eps)
        return self.kernels.add_rms_norm(added, residual, norm, eps)


def _rope_tables(spec: ModelSpec, weights: Weights) -> RopeTables:
    frequencies = rope_frequencies(spec).to(weights.embed.device)
    if weights.rope_factors is not None:
        frequencies = frequencies / weights.rope_factors
    return RopeTables.of(frequencies, spec.max_context)
