"""What does a layer cost whose mixers stand side by side, as attention beside a state space?"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from membound.roofline.models.attention import GroupedQueryAttention, LatentAttention
from membound.roofline.models.base import Frozen, LinearShape
from membound.roofline.models.recurrent import (
    GatedDeltaNet,
    KimiDeltaAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    Rwkv6,
    Rwkv7,
    ShortConv,
)

SingleMixer = Annotated[
    GroupedQueryAttention
    | LatentAttention
    | Mamba1
    | Mamba2
    | Rwkv6
    | Rwkv7
    | GatedDeltaNet
    | KimiDeltaAttention
    | LightningAttention
    | ShortConv,
    Field(discriminator="kind"),
]


class ParallelMixers(Frozen):
    """Mixers that read the same input and whose outputs are summed (Falcon-H1: attention beside Mamba-2).

    Each keeps what it keeps alone, so that all that it costs is the sum of its `mixers`.
    """

    kind: Literal["parallel"] = "parallel"
    mixers: tuple[SingleMixer, ...]

    @model_validator(mode="after")
    def _are_several(self) -> Self:
        if len(self.mixers) < 2:
            raise ValueError("mixers holds less than two, which are no mixers side by side")
        return self

    @property
    def parts(self) -> tuple[SingleMixer, ...]:
        return self.mixers

    @property
    def window(self) -> None:
        """Its own: none; `parts` may have one."""
        return None

    @property
    def kv_elements_per_token(self) -> int:
        return sum(mixer.kv_elements_per_token for mixer in self.mixers)

    def kv_elements_on_gpu(self, tp: int) -> int:
        return sum(mixer.kv_elements_on_gpu(tp) for mixer in self.mixers)

    @property
    def state_elements(self) -> int:
        return sum(mixer.state_elements for mixer in self.mixers)

    @property
    def state_bits(self) -> int:
        """Of the widest state."""
        return max(mixer.state_bits for mixer in self.mixers)

    def state_elements_on_gpu(self, tp: int) -> int:
        return sum(mixer.state_elements_on_gpu(tp) for mixer in self.mixers)

    @property
    def conv_elements(self) -> int:
        return sum(mixer.conv_elements for mixer in self.mixers)

    def linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]:
        return tuple(shape for mixer in self.mixers for shape in mixer.linears(hidden, tp))

    def vectors(self, hidden: int) -> int:
        return sum(mixer.vectors(hidden) for mixer in self.mixers)
