"""How are a model's weights, its cache and its work divided over devices?"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from membound.roofline.part import Part


class Parallelism(Part):
    """Tensor, pipeline, data, expert and context parallelism of one replica, on `devices` devices.

    `tp` splits each layer, `pp` the layers into stages, `cp` the context of each sequence. `dp` copies attention and
    divides the sequences, while mixtures of experts spread over all tp x dp devices of a stage: `ep` of them hold
    different experts, and what is left of tp x dp splits each expert.
    """

    tp: int = Field(1, ge=1, le=4096)
    pp: int = Field(1, ge=1, le=4096)
    dp: int = Field(1, ge=1, le=4096)
    ep: int = Field(1, ge=1, le=4096)
    cp: int = Field(1, ge=1, le=4096)

    @model_validator(mode="after")
    def _experts_divide(self) -> Self:
        if (self.tp * self.dp) % self.ep:
            raise ValueError(f"ep {self.ep} does not divide tp x dp = {self.tp * self.dp}")
        return self

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def moe_tp(self) -> int:
        """Devices that split one expert."""
        return self.tp * self.dp // self.ep


SINGLE = Parallelism()
