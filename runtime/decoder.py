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
from membound.runtime.blocks.base import LayerCache, Stream
from membound.runtime.blocks.build import BlockBuilder
from membound.runtime.blocks.latent import LatentMixer
from membound.runtime.blocks.moe import MixtureNetwork
from membound.runtime.blocks.norms import LayerNorm
from membound.runtime.blocks.routing import RouterStatistics
from membound.runtime.kv.steps import PlacedBatch, PlacingStore
from membound.runtime.linear import BiasedLinear, Linear
from membound.runtime.loading.weights import Weights
from membound.runtime.ragged import GuessedBatch
from membound.runtime.recipe import FormatRecipe, Recipe
from membound.runtime.replays import Replays

KvCache = Sequence[LayerCache]


class Hidden(NamedTuple):
    """The hidden states of a step's tokens after some layers, both [tokens, hidden]: the sum, and its final norm."""

    residual: Tensor
    normed: Tensor


class Decoder:
    """A stack of blocks over `kernels`, whose matrices are what `recipe` makes of `weights`; the embedding is bf16.

    It has as many layers as `weights`, which may be fewer than `spec` names. `new_store` makes the KV store of an
    attention layer; without it K and V lie as the kernels keep them. Latent attention is `absorbed` in decode or not.
    Steps are `replayed` where the kernels can, unless a layer does what these do not see, such as talk to others.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        kernels: Kernels,
        recipe: Recipe | WeightFormat = "bf16",
        new_store: NewStore | None = None,
        *,
        absorbed: bool = True,
        replayed: bool = True,
    ) -> None:
        if isinstance(recipe, str):
            recipe = FormatRecipe(kernels, recipe)
        weights = recipe.prepare(spec, weights)
        self.spec = spec
        self.kernels = kernels
        self.arithmetic = weights.arithmetic
        self.device = weights.embed.device
        self.embed = weights.embed
        self.extras = weights.extras
        self._replays = Replays(kernels) if replayed else None
        builder = BlockBuilder(
            spec,
            weights.arithmetic,
            kernels,
            recipe.linear,
            self.device,
            new_store,
            weights.rope_factors,
            absorbed=absorbed,
        )
        pairs = zip(spec.stack, weights.layers, strict=False)
        self.blocks = [builder.build(index, layer, tensors) for index, (layer, tensors) in enumerate(pairs)]
        self._latent = next((block.mixer for block in self.blocks if isinstance(block.mixer, LatentMixer)), None)
        self.final_norm = builder.norm(weights.final_norm, weights.extras.get("final_norm_bias"))
        self.embedding_norm: LayerNorm | None = None
        if "embedding_norm" in weights.extras:
            norm, bias = weights.extras["embedding_norm"], weights.extras.get("embedding_norm_bias")
            self.embedding_norm = LayerNorm(kernels, norm, bias, spec.norm_eps)
        head = recipe.linear("lm_head", weights.lm_head)
        bias = weights.extras.get("lm_head_bias")
        self.lm_head = head if bias is None else BiasedLinear(kernels, head, bias)
        matrices = {name for name, _ in self.linears()}
        self._vector_bytes = weights.final_norm.nbytes + sum(
            tensor.nbytes
            for index, layer in enumerate(weights.layers)
            for part, tensor in layer.items()
            if f"layers.{index}.{part}" not in matrices and part not in ("rkv", "rkvg")
        )

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Every matrix by its name, such as `layers.3.qkv`, and `lm_head`."""
        for index, block in enumerate(self.blocks):
            for part, linear in block.linears():
                yield f"layers.{index}.{part}", linear
        yield "lm_head", self.lm_head

    def storing(self, new_store: NewStore) -> Decoder:
        """The same weights over KV stores of another kind where a layer attends to K and V; the rest stays."""
        other = copy(self)
        other.blocks = [
            replace(block, mixer=block.mixer.storing(new_store)) if isinstance(block.mixer, GroupedAttention) else block
            for block in self.blocks
        ]
        return other

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step of many tokens reads: all but the embedding table, of which it reads rows.

        Of a mixture all experts count; `idle_bytes` are those that a single token does not read.
        """
        return sum(linear.nbytes for _, linear in self.linears()) + self._vector_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of the experts that one token does not take: a step reads between the two."""
        return sum(mixture.idle_bytes for mixture in self.mixtures().values())

    @property
    def emulated(self) -> bool:
        """Whether the time of a step means nothing, because a matrix is multiplied in another format than its own."""
        return any(linear.emulated for _, linear in self.linears())

    @property
    def graph_problem(self) -> str | None:
        """Why a step cannot be recorded once and replayed, in words; None where it can."""
        if any(mixture.together is None for mixture in self.mixtures().values()):
            return "which experts a step reads is decided on the host"
        return None

    @property
    def ignores_padding(self) -> bool:
        """Whether rows without a sequence do no harm: they have no seat for a state.

        It holds for the kernels that skip negative slots and empty contexts, unless a scale is of a whole step's rows.
        """
        mixers = [block.mixer for block in self.blocks if block.mixer]
        if any(linear.whole_step for _, linear in self.linears()):
            return False
        return all(isinstance(mixer, GroupedAttention | LatentMixer) for mixer in mixers)

    @property
    def router_statistics(self) -> dict[int, RouterStatistics]:
        """How often each expert was chosen, by the number of the layer; empty without mixtures."""
        return {index: mixture.statistics for index, mixture in self.mixtures().items()}

    @property
    def routing_notes(self) -> list[str]:
        """In words, how evenly the experts were used; nothing without mixtures."""
        found = [statistics for statistics in self.router_statistics.values() if statistics.tokens]
        if not found:
            return []
        slots = sum(int(statistics.load.sum()) for statistics in found)
        worst = max(found, key=lambda statistics: statistics.busiest)
        mean = sum(statistics.auxiliary_loss for statistics in found) / len(found)
        return [
            f"routers filled {slots} slots of experts; the busiest expert of a layer had {worst.busiest:.2f} times "
            f"the mean, and the auxiliary loss is {mean:.3f} (1 is even)"
        ]

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
        return self.continued(self._embedded(token_ids, batch.positions), batch, cache, layers)

    @torch.inference_mode()
    def continued(self, residual: Tensor, batch: RaggedBatch, cache: KvCache, layers: int | None = None) -> Hidden:
        """The same of tokens whose states before the first layer are `residual` [tokens, hidden], which changes."""

        def stack(states: Tensor) -> Tensor:
            stream, caches = Stream(states), iter(cache)
            for block in self.blocks[:layers]:
                block(stream, batch, next(caches) if block.mixer else None)
            return stream.normed(self.final_norm)

        if self._replays is None or isinstance(batch, GuessedBatch):
            return Hidden(residual, stack(residual))
        store = next((layer for layer in cache if isinstance(layer, PlacingStore)), None)
        batch = batch if store is None else store.placed(batch)
        on_latents = self._latent is not None and self._latent.stays_on_latents(batch)
        way = on_latents, isinstance(batch, PlacedBatch)
        return Hidden(residual, self._replays.run(stack, residual, batch, cache, layers, way))

    @torch.inference_mode()
    def logits(self, normed: Tensor) -> Tensor:
        """Logits [rows, vocab] in fp32 of hidden states [rows, hidden] that are normed."""
        logits = self.lm_head(normed).float()
        if self.arithmetic.logits_scale != 1:
            logits = logits * self.arithmetic.logits_scale
        cap = self.arithmetic.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _embedded(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed[token_ids].to(self.kernels.activation_dtype)  # [tokens, hidden]
        if self.arithmetic.embedding_scale != 1:
            x = x * self.arithmetic.embedding_scale
        if "positions" in self.extras:
            table = self.extras["positions"]
            # OPT's table has rows before the first position
            x = x + table[positions + table.shape[0] - self.spec.max_context].to(x.dtype)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def mixtures(self) -> dict[int, MixtureNetwork]:
        """The mixtures of experts by the number of their layer."""
        networks = enumerate(block.ffn for block in self.blocks)
        return {index: ffn for index, ffn in networks if isinstance(ffn, MixtureNetwork)}
