"""What are a model's weights, whatever file they come from?"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from membound.roofline.errors import MemboundError
from membound.runtime.arithmetic import Arithmetic


class WeightsError(MemboundError):
    """Weights that are missing, unreadable or not in the shape that their model needs."""


# One layer's tensors by the names of `shapes.py`: matrices [n, k] in bf16 by the names of `roofline.models` (a routed
# expert's as "experts.3.gate_up"), norms, biases and the like in fp32. Rows of q and k are in rotate-half order.
LayerWeights = dict[str, Tensor]


@dataclass(frozen=True)
class Weights:
    """A model's weights; `lm_head` is `embed` itself if tied. `origin` says in words what they are.

    `extras` are what few models have beside their layers, by the names of `shapes.py`.
    """

    embed: Tensor  # [vocab, hidden], bf16
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden], fp32
    lm_head: Tensor  # [vocab, hidden], bf16
    origin: str
    rope_factors: Tensor | None = None  # [rotated / 2], fp32, divides each rotation frequency in place of the spec's
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    extras: dict[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device | str) -> Weights:
        """The same weights on `device`, still tied if they were."""
        embed = self.embed.to(device)
        return replace(
            self,
            embed=embed,
            layers=tuple({name: tensor.to(device) for name, tensor in layer.items()} for layer in self.layers),
            final_norm=self.final_norm.to(device),
            lm_head=embed if self.lm_head is self.embed else self.lm_head.to(device),
            rope_factors=None if self.rope_factors is None else self.rope_factors.to(device),
            extras={name: tensor.to(device) for name, tensor in self.extras.items()},
        )
