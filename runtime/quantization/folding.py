"""How do scales of a linear's inputs go into what produces those inputs, so that no step has to apply them?

As SmoothQuant (arXiv 2211.10438, section 4) and AWQ (arXiv 2306.00978, section 3.2) do it: into the norm before qkv
and gate_up, into the rows of v before o, and into the rows of up before down.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from membound.roofline.models import GatedFfn, GroupedQueryAttention
from membound.roofline.models.layers import Layer
from membound.runtime.weights import LayerWeights

_NORMS = {"qkv": "mixer_norm", "gate_up": "ffn_norm"}


@dataclass(frozen=True)
class Folder:
    """The tensors of one layer, into which scales are folded one part after the other."""

    layer: Layer
    tensors: LayerWeights

    def takes(self, part: str) -> bool:
        """Whether the inputs of a part come from something that scales can be folded into."""
        attention, ffn = self.layer.attention, self.layer.ffn
        if part in ("qkv", "o"):
            return isinstance(attention, GroupedQueryAttention) and part in self.tensors
        return isinstance(ffn, GatedFfn) and part in ("gate_up", "down") and part in self.tensors

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
            tensors[_NORMS[part]] = tensors[_NORMS[part]] / scales
        elif part == "o":
            rows = self._heads(scales)[:, 0].reshape(-1)  # [kv_heads * head_dim]
            tensors["qkv"] = _last_rows_divided(tensors["qkv"], rows)
            if "qkv_bias" in tensors:
                tensors["qkv_bias"] = _last_rows_divided(tensors["qkv_bias"][:, None], rows)[:, 0]
        else:
            tensors["gate_up"] = _last_rows_divided(tensors["gate_up"], scales)

    def _heads(self, channels: Tensor) -> Tensor:
        attention = self.layer.attention
        assert isinstance(attention, GroupedQueryAttention)
        return channels.view(attention.kv_heads, attention.heads // attention.kv_heads, -1)


def _last_rows_divided(matrix: Tensor, divisors: Tensor) -> Tensor:
    """The matrix with its last rows divided: v is the last part of qkv, and up that of gate_up."""
    divided = matrix.clone()
    rows = len(divisors)
    divided[-rows:] = (matrix[-rows:].float() / divisors[:, None]).to(matrix.dtype)
    return divided
