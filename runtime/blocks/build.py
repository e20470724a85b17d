"""Which parts does a layer of a model consist of?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from membound.kernels.base import Kernels
from membound.roofline.models import GatedFfn, GroupedQueryAttention, ModelError, ModelSpec
from membound.roofline.models.layers import Layer
from membound.runtime.blocks.attention import GroupedAttention, NewStore
from membound.runtime.blocks.base import Block, FeedForward, Mixer
from membound.runtime.blocks.ffn import GatedNetwork
from membound.runtime.kv_store import KvStore, PlainKv
from membound.runtime.linear import Linear
from membound.runtime.rope import RopeTables
from membound.runtime.weights import LayerWeights

MakeLinear = Callable[[str, Tensor], Linear]


def plain_store(kernels: Kernels, device: torch.device) -> NewStore:
    """Makes KV stores as the kernels keep K and V, without quantization or eviction."""

    def new_store(attention: GroupedQueryAttention, num_blocks: int, block_size: int, seats: int) -> KvStore:
        return PlainKv.zeroed(kernels, attention, num_blocks, block_size, device)

    return new_store


@dataclass(frozen=True)
class BlockBuilder:
    """Builds the layers of one decoder; `linear` makes the linear layer of a matrix by its name."""

    spec: ModelSpec
    kernels: Kernels
    rope: RopeTables
    linear: MakeLinear
    new_store: NewStore

    def build(self, index: int, layer: Layer, weights: LayerWeights) -> Block:
        """Layer `index`; raises ModelError for one whose parts this runtime does not compute."""
        return Block(
            weights["mixer_norm"],
            self._mixer(index, layer, weights),
            weights["ffn_norm"],
            self._ffn(index, layer, weights),
        )

    def _matrix(self, index: int, part: str, weights: LayerWeights) -> Linear:
        return self.linear(f"layers.{index}.{part}", weights[part])

    def _mixer(self, index: int, layer: Layer, weights: LayerWeights) -> Mixer:
        attention = layer.attention
        if not isinstance(attention, GroupedQueryAttention):
            raise ModelError(f"attention of {self.spec.name} is {attention.kind}, which the runtime does not compute")
        norms = (weights["q_norm"], weights["k_norm"]) if attention.qk_norm else None
        return GroupedAttention(
            attention,
            self.kernels,
            self.rope,
            self._matrix(index, "qkv", weights),
            self._matrix(index, "o", weights),
            self.new_store,
            bias=weights.get("qkv_bias"),
            norms=norms,
            norm_eps=self.spec.norm_eps,
        )

    def _ffn(self, index: int, layer: Layer, weights: LayerWeights) -> FeedForward:
        if not isinstance(layer.ffn, GatedFfn):
            raise ModelError(f"ffn of {self.spec.name} is {layer.ffn.kind}, which the runtime does not compute")
        gate_up, down = (self._matrix(index, part, weights) for part in ("gate_up", "down"))
        return GatedNetwork(self.kernels, gate_up, down)
