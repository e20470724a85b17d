"""Which parts does a layer of a model consist of?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from membound.kernels.base import Kernels
from membound.roofline.models import GatedFfn, GroupedQueryAttention, LatentAttention, ModelError, ModelSpec, MoeFfn
from membound.roofline.models.ffn import ChannelMix, DenseFfn
from membound.roofline.models.layers import Layer
from membound.roofline.models.recurrent import GatedDeltaNet, Mamba1, Mamba2, Rwkv6, Rwkv7
from membound.runtime.arithmetic import Arithmetic
from membound.runtime.blocks.attention import GroupedAttention, HeadNorms, NewStore
from membound.runtime.blocks.base import Block, FeedForward, Mixer, ShiftedFeedForward
from membound.runtime.blocks.delta_net import DeltaNetMixer
from membound.runtime.blocks.ffn import DenseNetwork, GatedNetwork, bending, gating
from membound.runtime.blocks.latent import LatentLinears, LatentMixer
from membound.runtime.blocks.mamba import Mamba1Mixer, Mamba2Mixer
from membound.runtime.blocks.moe import MixtureNetwork
from membound.runtime.blocks.norms import LayerNorm, Norm, RmsNorm
from membound.runtime.blocks.rwkv import ChannelMixNetwork, Rwkv6Mixer, Rwkv7Mixer, ValueOfFirstLayer
from membound.runtime.blocks.sinks import sink_store
from membound.runtime.kv.store import KvStore, PlainKv
from membound.runtime.linear import BiasedLinear, Linear
from membound.runtime.loading.weights import LayerWeights
from membound.runtime.rope import RopeTables, rope_tables, unrotated_tables

MakeLinear = Callable[[str, Tensor], Linear]
LATENT_EPS = 1e-6  # DeepSeek's norms of q's and of the latent have this one whatever the config says


def plain_store(kernels: Kernels, device: torch.device) -> NewStore:
    """Makes KV stores as the kernels keep K and V, without quantization or eviction."""

    def new_store(attention: GroupedQueryAttention, num_blocks: int, block_size: int, seats: int) -> KvStore:
        return PlainKv.zeroed(kernels, attention, num_blocks, block_size, device)

    return new_store


@dataclass(frozen=True)
class BlockBuilder:
    """Builds the layers of one decoder; `linear` makes the linear layer of a matrix by its name.

    `new_store` makes the KV stores of attention over K and V; without it they are plain. `rope_factors` are those of
    the weights.
    """

    spec: ModelSpec
    arithmetic: Arithmetic
    kernels: Kernels
    linear: MakeLinear
    device: torch.device
    new_store: NewStore | None = None
    rope_factors: Tensor | None = None
    absorbed: bool = True
    _tables: dict[tuple[int, bool, bool], RopeTables] = field(default_factory=dict)

    def build(self, index: int, layer: Layer, weights: LayerWeights) -> Block:
        """Layer `index`; raises ModelError for one that the chosen KV store does not fit."""
        parts = _Parts(self, f"layers.{index}.", weights)
        return Block(
            self.kernels,
            mixer=self._mixer(index, layer, parts),
            ffn=self._ffn(layer, parts),
            mixer_norm=self._layer_norm("mixer_norm", layer, weights),
            mixer_post_norm=self._layer_norm("mixer_post_norm", layer, weights),
            ffn_norm=self._layer_norm("ffn_norm", layer, weights),
            ffn_post_norm=self._layer_norm("ffn_post_norm", layer, weights),
            parallel=self.arithmetic.placement == "parallel",
            scale=self.arithmetic.residual_scale,
        )

    def norm(self, weight: Tensor | None, bias: Tensor | None = None) -> Norm:
        """A norm over the hidden state of the kind that the model has."""
        if self.spec.norm == "rms":
            assert weight is not None, "an RMS norm has a weight"
            return RmsNorm(self.kernels, weight, self.spec.norm_eps)
        return LayerNorm(self.kernels, weight, bias, self.spec.norm_eps)

    def _layer_norm(self, name: str, layer: Layer, weights: LayerWeights) -> Norm | None:
        if name in weights:
            return self.norm(weights[name], weights.get(f"{name}_bias"))
        part = layer.attention if name.startswith("mixer") else layer.ffn
        unscaled = self.spec.norm == "unscaled" and part.kind != "none" and not name.endswith("post_norm")
        return self.norm(None) if unscaled else None

    def _mixer(self, index: int, layer: Layer, parts: _Parts) -> Mixer | None:
        a, kernels, eps = layer.attention, self.kernels, self.spec.norm_eps
        weights = parts.weights
        if isinstance(a, GroupedQueryAttention):
            return self._attention(index, a, parts)
        if isinstance(a, LatentAttention):
            return self._latent(index, a, parts)
        if isinstance(a, Mamba2):
            return Mamba2Mixer(a, kernels, parts["in_proj"], parts["out_proj"], weights, eps, self.device)
        if isinstance(a, Mamba1):
            linears = {name: parts[name] for name in ("in_proj", "x_proj", "dt_proj", "out_proj")}
            return Mamba1Mixer(a, kernels, linears, weights, eps, self.device)
        if isinstance(a, GatedDeltaNet):
            linears = {name: parts[name] for name in ("qkvz", "ba", "o")}
            return DeltaNetMixer(a, kernels, linears, weights, eps, self.device)
        if isinstance(a, Rwkv6):
            return Rwkv6Mixer(a, kernels, parts.rows("rkvg", "rkvg"), parts["o"], weights, self.device)
        if isinstance(a, Rwkv7):
            linears = parts.rows("rkv", "rkv")
            return Rwkv7Mixer(a, kernels, linears, parts["o"], weights, self._first_value, index == 0, self.device)
        return None

    @cached_property
    def _first_value(self) -> ValueOfFirstLayer:
        return ValueOfFirstLayer()

    def _attention(self, index: int, a: GroupedQueryAttention, parts: _Parts) -> Mixer:
        weights, arithmetic = parts.weights, self.arithmetic
        norms = (
            HeadNorms(weights["q_norm"], weights["k_norm"], a.qk_norm_over, self.spec.norm_eps) if a.qk_norm else None
        )
        if a.sinks and self.new_store is not None:
            raise ModelError(
                f"attention of {self.spec.name} has learned sinks, with which K and V must stay as they are"
            )
        store = self.new_store or plain_store(self.kernels, self.device)
        return GroupedAttention(
            a,
            self.kernels,
            self._rope(index, a.head_dim, self._rotated(a.head_dim), windowed=a.window is not None),
            parts["qkv"],
            parts["o"],
            sink_store(self.kernels, weights["sinks"]) if a.sinks else store,
            norms=norms,
            scale=arithmetic.attention_scale,
            softcap=arithmetic.attention_softcap,
        )

    def _latent(self, index: int, a: LatentAttention, parts: _Parts) -> Mixer:
        weights = parts.weights
        if self.new_store is not None:
            raise ModelError(f"attention of {self.spec.name} is mla, whose latents only a plain cache keeps")
        kv_b, o = parts["kv_b"], parts["o"]
        if a.q_lora_rank is None:
            linears = LatentLinears(kv_b, o, parts["q"], kv_a=parts["kv_a"])
        else:
            q_norm = RmsNorm(self.kernels, weights["q_a_norm"], LATENT_EPS)
            linears = LatentLinears(kv_b, o, parts["q_b"], inputs=parts["q_a_kv_a"], q_norm=q_norm)
        return LatentMixer(
            a,
            self.kernels,
            self._rope(index, a.qk_rope_head_dim, a.qk_rope_head_dim),
            linears,
            RmsNorm(self.kernels, weights["kv_a_norm"], LATENT_EPS),
            self.arithmetic.attention_scale or a.qk_head_dim**-0.5,
            absorbed=self.absorbed,
            device=self.device,
        )

    def _rotated(self, head_dim: int) -> int:
        return int(head_dim * self.spec.rotary_fraction) // 2 * 2

    def _rope(self, index: int, head_dim: int, rotated: int, *, windowed: bool = False) -> RopeTables:
        turned = index not in self.arithmetic.unrotated and not self.spec.position_rows
        windowed = windowed and self.arithmetic.windowed_rope_theta is not None
        key = (head_dim, windowed, turned)
        if key not in self._tables:
            self._tables[key] = (
                rope_tables(
                    self.spec,
                    self.arithmetic,
                    head_dim,
                    rotated,
                    windowed=windowed,
                    factors=self.rope_factors,
                    device=self.device,
                )
                if turned
                else unrotated_tables(head_dim, self.spec.max_context, self.device)
            )
        return self._tables[key]

    def _ffn(self, layer: Layer, parts: _Parts) -> FeedForward | ShiftedFeedForward | None:
        ffn = layer.ffn
        if isinstance(ffn, GatedFfn | DenseFfn):
            return self._network(parts, gated=isinstance(ffn, GatedFfn))
        if isinstance(ffn, ChannelMix):
            names = (*(("receptance",) if ffn.receptance else ()), "up", "down")
            return ChannelMixNetwork(self.kernels, {name: parts[name] for name in names}, parts.weights["ffn_shift"])
        if not isinstance(ffn, MoeFfn):
            return None
        return MixtureNetwork(
            self.arithmetic.routing,
            ffn.top_k,
            parts["router"],
            [
                self._network(parts, f"experts.{e}.", gated=ffn.gated) if f"experts.{e}.down" in parts.weights else None
                for e in range(ffn.experts)
            ],
            kernels=self.kernels,
            by_expert=ffn.choice == "expert",
            router_bias=parts.weights.get("router_bias"),
            shared=self._network(parts, "shared_", gated=ffn.gated) if ffn.shared_intermediate else None,
            shared_gate=parts["shared_gate"] if ffn.shared_gate else None,
            latent=(parts["latent_in"], parts["latent_out"]) if ffn.latent else None,
            device=self.device,
        )

    def _network(self, parts: _Parts, prefix: str = "", *, gated: bool) -> FeedForward:
        down = parts[f"{prefix}down"]
        if not gated:
            return DenseNetwork(bending(self.kernels, self.spec.activation), parts[f"{prefix}up"], down, prefix)
        gate = gating(self.kernels, self.spec.activation, self.arithmetic.glu_limit)
        return GatedNetwork(gate, parts[f"{prefix}gate_up"], down, prefix)


@dataclass(frozen=True)
class _Parts:
    """The matrices of one layer as linear layers, with their biases where they have some."""

    builder: BlockBuilder
    prefix: str
    weights: LayerWeights

    def __getitem__(self, part: str) -> Linear:
        linear = self.builder.linear(self.prefix + part, self.weights[part])
        bias = self.weights.get(f"{part}_bias") if part != "router" else None
        return linear if bias is None else BiasedLinear(self.builder.kernels, linear, bias)

    def rows(self, part: str, names: str) -> dict[str, Linear]:
        """A matrix in as many linear layers as there are letters in `names`, because each reads another input."""
        pieces = self.weights[part].chunk(len(names))
        return {
            name: self.builder.linear(f"{self.prefix}{name}", rows) for name, rows in zip(names, pieces, strict=True)
        }
