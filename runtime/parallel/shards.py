"""Which part of a model's weights does each of several devices hold?

The division of Shoeybi et al., Megatron-LM (2019): q, k, v, gate and up by rows, o and down by columns, so that a layer
sums twice over the devices; the lm_head by rows, so that its logits are gathered. Where tokens must not depend on the
division, o and down are divided by rows too, and their inputs gathered. Of latent attention the heads are divided and
the latents copied. Routed experts are divided among `ep` groups of devices, as in Lepikhin et al., GShard
(2020), and each expert among the devices of its group; the router is on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from membound.roofline.errors import MemboundError
from membound.roofline.models import GatedFfn, GroupedQueryAttention, LatentAttention, ModelSpec, MoeFfn
from membound.roofline.models.ffn import DenseFfn
from membound.roofline.models.layers import Attention, Ffn, Layer
from membound.roofline.parallel import Parallelism
from membound.runtime.loading.weights import LayerWeights, Weights


@dataclass(frozen=True)
class Share:
    """What device `rank` holds: slice `rank` of what all divide, and slice `inner` of the experts of `group`.

    Experts are divided among groups of `split` devices each.
    """

    rank: int
    parallel: Parallelism

    @property
    def tp(self) -> int:
        return self.parallel.tp

    @property
    def ep(self) -> int:
        return self.parallel.ep

    @property
    def split(self) -> int:
        return self.tp // self.ep

    @property
    def group(self) -> int:
        return self.rank // self.split

    @property
    def inner(self) -> int:
        return self.rank % self.split

    def holds(self, expert: int, experts: int) -> bool:
        """Whether a part of that routed expert lies here."""
        return expert // (experts // self.ep) == self.group


def shard_spec(spec: ModelSpec, parallel: Parallelism) -> ModelSpec:
    """The shape of the part that one device holds; raises MemboundError where the model does not divide.

    Mixtures keep their number of experts, because the router chooses among all of them.
    """
    tp, ep = parallel.tp, parallel.ep
    usual = Layer(spec.usual_attention, spec.usual_ffn)
    for layer in {*spec.stack, usual}:
        _check(spec, layer, parallel)
    return spec.model_copy(
        update={
            "attention": _narrower(usual.attention, tp),
            "ffn": _thinner(usual.ffn, tp, ep),
            "overrides": tuple(
                override.model_copy(
                    update={
                        "attention": override.attention and _narrower(override.attention, tp),
                        "ffn": override.ffn and _thinner(override.ffn, tp, ep),
                    }
                )
                for override in spec.overrides
            ),
        }
    )


def shard_weights(spec: ModelSpec, weights: Weights, share: Share) -> Weights:
    """The part of one device; the embedding is whole on each. Raises MemboundError as `shard_spec` does."""
    shard_spec(spec, share.parallel)
    divided = spec.vocab % share.tp == 0
    lm_head = _rows(weights.lm_head, [spec.vocab], share.rank, share.tp) if divided else weights.lm_head
    layers = zip(spec.stack, weights.layers, strict=False)
    parts = tuple(_ffn_part(layer.ffn, _mixer_part(layer.attention, held, share), share) for layer, held in layers)
    return replace(weights, layers=parts, lm_head=lm_head)


def _check(spec: ModelSpec, layer: Layer, parallel: Parallelism) -> None:
    """Raises MemboundError where a layer does not divide."""
    tp, ep = parallel.tp, parallel.ep
    attention, ffn = layer
    mixes = isinstance(attention, LatentAttention) or (
        isinstance(attention, GroupedQueryAttention)
        and not attention.output_gate
        and not (attention.qk_norm and attention.qk_norm_over == "heads")
    )
    if not (mixes and isinstance(ffn, GatedFfn | DenseFfn | MoeFfn)):
        raise MemboundError(
            f"parallel.tp is {tp}, but the runtime divides layers of attention, with one norm for each head and no "
            f"gate on its output, and of dense, gated or expert networks, and {spec.name} has others; set it to 1"
        )
    assert isinstance(attention, GroupedQueryAttention | LatentAttention), "checked above"
    if parallel.exact and isinstance(ffn, MoeFfn):
        raise MemboundError(f"parallel.exact is true, but {spec.name} sums its experts over devices; leave it out")
    counts = [("attention.heads", attention.heads, "parallel.tp", tp)]
    if parallel.exact:
        counts.append(("hidden", spec.hidden, "parallel.tp", tp))
    if isinstance(attention, GroupedQueryAttention):
        counts.append(("attention.kv_heads", attention.kv_heads, "parallel.tp", tp))
    if isinstance(ffn, MoeFfn):
        counts.append(("ffn.shared_intermediate", ffn.shared_intermediate, "parallel.tp", tp))
        counts.append(("ffn.experts", ffn.experts, "parallel.ep", ep))
        counts.append(("ffn.intermediate", ffn.intermediate, "parallel.tp / parallel.ep", tp // ep))
    elif isinstance(ffn, GatedFfn | DenseFfn):
        counts.append(("ffn.intermediate", ffn.intermediate, "parallel.tp", tp))
    for what, count, by, parts in counts:
        if count % parts:
            raise MemboundError(f"{by} is {parts}, but {what} of {spec.name} is {count}, which it does not divide")


def _narrower(attention: Attention, tp: int) -> Attention:
    changed = {"heads": attention.heads // tp}  # type: ignore[union-attr]
    if isinstance(attention, GroupedQueryAttention):
        changed["kv_heads"] = attention.kv_heads // tp
    return attention.model_copy(update=changed)


def _thinner(ffn: Ffn, tp: int, ep: int) -> Ffn:
    if isinstance(ffn, MoeFfn):
        changed = {
            "intermediate": ffn.intermediate // (tp // ep),
            "shared_intermediate": ffn.shared_intermediate // tp,
        }
    else:
        changed = {"intermediate": ffn.intermediate // tp}  # type: ignore[union-attr]
    return ffn.model_copy(update=changed)


def _mixer_part(attention: Attention, held: LayerWeights, share: Share) -> LayerWeights:
    """The layer's weights, those of its attention divided."""
    parts = dict(held)
    if isinstance(attention, GroupedQueryAttention):
        kv_rows = attention.kv_heads * attention.head_dim, attention.kv_heads * attention.value_dim
        qkv_rows = [attention.heads * attention.head_dim, *kv_rows]
        by_rows = {"qkv": qkv_rows, "qkv_bias": qkv_rows, "sinks": [attention.heads]}
    else:
        by_rows = {name: [len(held[name])] for name in ("q", "q_b", "kv_b") if name in held}
    for name, sections in by_rows.items():
        if name in held:
            parts[name] = _rows(held[name], sections, share.rank, share.tp)
    parts["o"] = _after_divided(held["o"], share.rank, share.tp, share.parallel.exact)
    return parts


def _ffn_part(ffn: Ffn, held: LayerWeights, share: Share) -> LayerWeights:
    """The weights of the layer's network, divided; of a mixture those of the experts that lie here."""
    if not isinstance(ffn, MoeFfn):
        return held | _network_part(held, "", share.rank, share.tp, share.parallel.exact)
    parts = {name: tensor for name, tensor in held.items() if not name.startswith("experts.")}
    parts |= _network_part(held, "shared_", share.rank, share.tp)
    for expert in range(ffn.experts):
        if share.holds(expert, ffn.experts):
            prefix = f"experts.{expert}."
            parts |= _network_part(held, prefix, share.inner, share.split)
            if share.inner and f"{prefix}down_bias" in held:  # added before the sum, so by one device alone
                parts[f"{prefix}down_bias"] = torch.zeros_like(held[f"{prefix}down_bias"])
    return parts


def _network_part(held: LayerWeights, prefix: str, part: int, of: int, exact: bool = False) -> LayerWeights:
    """One network's gate, up and down."""
    parts: LayerWeights = {}
    for name, tensor in held.items():
        kind = name.removeprefix(prefix)
        if not name.startswith(prefix):
            continue
        if kind == "down":
            parts[name] = _after_divided(tensor, part, of, exact)
        elif kind == "down_bias":
            parts[name] = tensor
        elif kind in ("gate_up", "gate_up_bias", "up", "up_bias"):
            sections = 2 if kind.startswith("gate_up") else 1
            parts[name] = _rows(tensor, [len(tensor) // sections] * sections, part, of)
    return parts


def _rows(matrix: Tensor, sections: list[int], rank: int, tp: int) -> Tensor:
    """The rows of `rank` from each section: those of its heads from q, from k and from v."""
    return torch.cat([part.chunk(tp)[rank] for part in matrix.split(sections)]).contiguous()


def _after_divided(matrix: Tensor, rank: int, tp: int, exact: bool) -> Tensor:
    """The part of a matrix of whose inputs each device has some: their columns, or rows that need all inputs."""
    return matrix.chunk(tp, dim=0 if exact else 1)[rank].contiguous()
