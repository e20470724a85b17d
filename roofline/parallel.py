"""How are a model's weights, its cache and its work divided over devices?"""

from __future__ import annotations

from typing import Self

import numpy as np
from pydantic import Field, model_validator

from membound.roofline.part import Part
from membound.roofline.shape import Count, whole_ones


class Parallelism(Part):
    """Tensor, pipeline, data, expert and context parallelism of one replica, on `devices` devices.

    `tp` splits each layer, `pp` the layers into stages, `cp` the context of each sequence. `dp` copies attention and
    divides the sequences, while mixtures of experts spread over all tp x dp devices of a stage: `ep` of them hold
    different experts, and what is left of tp x dp splits each expert. A pipeline has `micro_batches` parts of its batch
    under way, as many as stages where it is not given (as vLLM does); with 1 a step passes all stages before the next
    begins, and all but one of them wait. With `exact`, devices of `tp` exchange the inputs of a matrix instead of sums
    of its products: each output is summed by one device over all inputs, in the order in which a single device does.
    """

    tp: int = Field(1, ge=1, le=4096)
    pp: int = Field(1, ge=1, le=4096)
    dp: int = Field(1, ge=1, le=4096)
    ep: int = Field(1, ge=1, le=4096)
    cp: int = Field(1, ge=1, le=4096)
    micro_batches: int | None = Field(
        None, ge=1, le=4096, description="parts of the batch in a pipeline; pp if not given"
    )

    exact: bool = Field(False, description="tp leaves every token as one device gives it, for more traffic")

    @model_validator(mode="after")
    def _exact_needs_slices(self) -> Self:
        if self.exact and self.tp == 1:
            raise ValueError("exact is true, but tp is 1: nothing is summed over devices; give tp, or leave it out")
        return self

    @model_validator(mode="after")
    def _experts_divide(self) -> Self:
        if (self.tp * self.dp) % self.ep:
            raise ValueError(f"ep {self.ep} does not divide tp x dp = {self.tp * self.dp}")
        return self

    @model_validator(mode="after")
    def _micro_batches_need_stages(self) -> Self:
        if self.micro_batches is not None and self.pp == 1:
            raise ValueError(
                f"micro_batches is {self.micro_batches}, but pp is 1: there are no stages; give pp, or leave it out"
            )
        return self

    def degrees(self) -> dict[str, int]:
        """By how much each kind of parallelism divides."""
        return {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": self.ep, "cp": self.cp}

    @property
    def most_micro_batches(self) -> int:
        """Micro-batches that are under way where there are sequences enough."""
        return self.micro_batches or self.pp

    def micro_batches_of(self, sequences: Count) -> Count:
        """Micro-batches that so many sequences of a replica make; none has less than one sequence."""
        return np.clip(whole_ones(sequences, self.dp), 1.0, float(self.most_micro_batches))

    def busy_stages(self, sequences: Count) -> Count:
        """Stages that have a micro-batch to work on, of so many sequences of a replica."""
        return np.minimum(self.micro_batches_of(sequences), float(self.pp))

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def devices_of_rank(self) -> int:
        """Devices over which the cache of one sequence is spread."""
        return self.tp * self.pp * self.cp

    @property
    def moe_tp(self) -> int:
        """Devices that split one expert."""
        return self.tp * self.dp // self.ep


SINGLE = Parallelism()
