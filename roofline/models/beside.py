"""What runs in every layer beside its mixer and its network: inputs of its own, more residual streams?

Small matrices are whole on each GPU, as engines keep them.
"""

from __future__ import annotations

from typing import Protocol

from pydantic import Field, PositiveInt

from membound.roofline.models.base import Frozen, LinearShape


class Beside(Protocol):
    """What each of them says of a model of so many layers."""

    @property
    def name(self) -> str: ...

    def layer_linears(self, hidden: int) -> tuple[LinearShape, ...]:
        """The matrices of one layer."""

    def step_linears(self, hidden: int, layers: int) -> tuple[LinearShape, ...]:
        """The matrices that a step passes once."""

    def layer_vectors(self, hidden: int) -> int:
        """Parameters of one layer in no matrix."""

    def step_vectors(self, hidden: int) -> int:
        """Parameters in no matrix that a step passes once."""

    def table(self, layers: int) -> tuple[int, int]:
        """Rows and columns of a table of which a token takes one row; none: (0, 0)."""

    def passes(self) -> int:
        """How often a layer reads and writes a hidden state for it, outside its matrices."""


class PerLayerInput(Frozen):
    """A token has `width` elements for each layer in a table, which the layer gates and adds (Gemma 3n, Gemma 4 E2B).

    Beside the table a projection of the token's embedding gives each layer as many.
    """

    vocab: PositiveInt
    width: PositiveInt

    @property
    def name(self) -> str:
        return "layer_input"

    def layer_linears(self, hidden: int) -> tuple[LinearShape, ...]:
        return LinearShape("layer_input_gate", self.width, hidden), LinearShape("layer_input", hidden, self.width)

    def step_linears(self, hidden: int, layers: int) -> tuple[LinearShape, ...]:
        return (LinearShape("layer_inputs", layers * self.width, hidden),)

    def layer_vectors(self, hidden: int) -> int:
        """The norm of what is added."""
        return hidden

    def step_vectors(self, hidden: int) -> int:
        """The norm of the projection."""
        return self.width

    def table(self, layers: int) -> tuple[int, int]:
        return self.vocab, layers * self.width

    def passes(self) -> int:
        return 1


class AltUpStreams(Frozen):
    """AltUp (Baykal et al. 2023, arXiv 2301.13310): the residual is `streams` wide, of which a layer computes one.

    A layer predicts the others and corrects them by what it computed. With `laurel_rank` a residual of low rank stands
    beside attention (LAuReL, arXiv 2411.07501). Both are Gemma 3n's.
    """

    streams: int = Field(ge=2, le=64)
    laurel_rank: PositiveInt

    @property
    def name(self) -> str:
        return "streams"

    def layer_linears(self, hidden: int) -> tuple[LinearShape, ...]:
        return (
            LinearShape("stream_router", self.streams, hidden),
            LinearShape("laurel_a", self.laurel_rank, hidden),
            LinearShape("laurel_b", hidden, self.laurel_rank),
        )

    def step_linears(self, hidden: int, layers: int) -> tuple[LinearShape, ...]:
        """Into the other streams before the first layer, and out of them behind the last one."""
        others = (self.streams - 1) * hidden
        return LinearShape("streams_in", others, hidden), LinearShape("streams_out", others, hidden)

    def layer_vectors(self, hidden: int) -> int:
        """The router's norm, LAuReL's, the scale of what is corrected, and the coefficients of both steps."""
        return 3 * hidden + self.streams**3 + self.streams**2

    def step_vectors(self, hidden: int) -> int:
        return 0

    def table(self, layers: int) -> tuple[int, int]:
        return 0, 0

    def passes(self) -> int:
        """All streams are read and written as they are predicted, and again as they are corrected."""
        return 2 * self.streams
