"""How do scales of a linear's inputs go into what produces those inputs, so that no step has to apply them?

As SmoothQuant (arXiv 2211.10438, section 4) and AWQ (arXiv 2306.00978, section 3.2) do it: into the norm before qkv
and gate_up, into the rows of v before o, and into the rows of up before down.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from membound.roofline.models import GatedFfn, GroupedQueryAttention
from membound.roofline.models.layers import Layer
from membound.runtime.loading.weights import LayerWeights

_NORMS = {"qkv": "mixer_norm", "gate_up": "ffn_norm"}


@dataclass(frozen=True)
class Folder:
    """The tensors of one layer, into which scales are folded one part after the other.

    `clamped` says that the network clamps what `up` returns, which then cannot be scaled.
    """

    layer: Layer
    tensors: LayerWeights
    clamped: bool = False

    def takes(self, part: str) -> bool:
        """Whether the inputs of a part come from something that scales can be folded into, and from nothing else."""
        attention, ffn, tensors = self.layer.attention, self.layer.ffn, self.tensors
        if part not in tensors:
            return False
        if part in _NORMS:  # a norm that attention and network share belongs to neither
            kinds = isinstance(attention, GroupedQueryAttention) if part == "qkv" else isinstance(ffn, GatedFfn)
            return kinds and "mixer_norm" in tensors and "ffn_norm" in tensors
        if part == "o":
            plain = isinstance(attention, GroupedQueryAttention) and not attention.output_gate
            return plain and not attention.v_is_k  # type: ignore[union-attr]
        return part == "down" and isinstance(ffn, GatedFfn) and not self.clamped

    def shared(self, part: str, magnitude: Tensor) -> Tensor:
        """The magnitude [k] of the channels, equal where they have to share a scale: the mean of those that do.

        All query heads of a group read the same row of v.
        """
        if part != "o":
            return magnitude
        by_head = self._heads(magnitude)  # [kv_heads, group, head_dim]
        return by_head.mean(1, keepdim=True).expand_as(by_head).reshape(-1)

    def fold(self, part: str, scales: Tensor) -> None:
        """Divides the inputs of a part by `scales` [k] where they are made, and multiplies its columns by them."""
        tensors = self.tensors
        tensors[part] = (tensors[part].float() * scales).to(tensors[part].dtype)
        if part in _NORMS:
            norm = _NORMS[part]
            for name in {norm, f"{norm}_bias"} & tensors.keys():
                tensors[name] = tensors[name] / scales
            return
        before = "qkv" if part == "o" else "gate_up"
        rows = self._heads(scales)[:, 0].reshape(-1) if part == "o" else scales
        for name in {before, f"{before}_bias"} & tensors.keys():
            tensors[name] = _last_rows_divided(tensors[name], rows)

    def _heads(self, channels: Tensor) -> Tensor:
        attention = self.layer.attention
        assert isinstance(attention, GroupedQueryAttention)
        return channels.view(attention.kv_heads, attention.heads // attention.kv_heads, -1)


def _last_rows_divided(tensor: Tensor, divisors: Tensor) -> Tensor:
    """A matrix or bias with its last rows divided: v is the last part of qkv, and up that of gate_up."""
    divided = tensor.clone()
    rows = divisors if tensor.dim() == 1 else divisors[:, None]
    divided[-len(divisors) :] = (tensor[-len(divisors) :].float() / rows).to(tensor.dtype)
    return divided
