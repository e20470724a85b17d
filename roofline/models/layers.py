"""Which layers does a model stack, and how is a stack that alternates written down in a few words?"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field, field_validator

from membound.roofline.models.attention import NoMixer
from membound.roofline.models.base import Frozen, TokenMixer
from membound.roofline.models.ffn import ChannelMix, DenseFfn, GatedFfn, MoeFfn, NoFfn
from membound.roofline.models.side_by_side import ParallelMixers, SingleMixer

Attention = Annotated[SingleMixer | ParallelMixers | NoMixer, Field(discriminator="kind")]
Ffn = Annotated[GatedFfn | DenseFfn | MoeFfn | ChannelMix | NoFfn, Field(discriminator="kind")]


class Layer(NamedTuple):
    """One layer: what mixes its tokens, and its feed-forward network."""

    attention: Attention
    ffn: Ffn


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """`count` equal layers, which need not be neighbours."""

    count: int
    attention: Attention
    ffn: Ffn

    @property
    def mixers(self) -> tuple[TokenMixer, ...]:
        """What mixes the tokens of one of them: one mixer, or several side by side."""
        return self.attention.parts


class LayerOverride(Frozen):
    """Layers that differ from the model's usual one in attention, feed-forward network or both.

    `layers` is a slice as in Python (":3": the first three, "1::2": every second) or a list of indices. In YAML a
    part of the usual kind need only say what differs: `{layers: "1::2", attention: {window: 4096}}`.
    """

    layers: str | tuple[int, ...]
    attention: Attention | None = None
    ffn: Ffn | None = None

    @field_validator("layers")
    @classmethod
    def _is_a_slice(cls, layers: str | tuple[int, ...]) -> str | tuple[int, ...]:
        if isinstance(layers, str) and not re.fullmatch(r"-?\d*:(-?\d*)(:[1-9]\d*)?", layers):
            raise ValueError(f'layers {layers!r} is not a slice such as ":3" or "1::2"')
        return layers

    def indices(self, count: int) -> tuple[int, ...]:
        """The layers meant, in a model of `count` layers; raises ValueError where there is none."""
        if isinstance(self.layers, str):
            bounds = [int(part) if part else None for part in self.layers.split(":")]
            chosen = tuple(range(count)[slice(*bounds)])
        else:
            chosen = self.layers
        outside = [index for index in chosen if not 0 <= index < count]
        if outside or not chosen:
            raise ValueError(f"layers {self.layers!r} names layers that a model of {count} layers does not have")
        return chosen


def stacked(count: int, usual: Layer, overrides: tuple[LayerOverride, ...]) -> tuple[Layer, ...]:
    """All layers in order; where overrides meet, the later one wins."""
    layers = [usual] * count
    for override in overrides:
        for index in override.indices(count):
            layers[index] = Layer(override.attention or layers[index].attention, override.ffn or layers[index].ffn)
    return tuple(layers)


def grouped(stack: tuple[Layer, ...]) -> tuple[LayerGroup, ...]:
    """Equal layers merged, in the order of their first."""
    return tuple(LayerGroup(count, *layer) for layer, count in Counter(stack).items())


def difference(parts: list[Frozen]) -> str:
    """In words, what differs between parts that a uniform model would have equal: their kinds or their fields."""
    kinds = sorted({str(part.model_dump()["kind"]) for part in parts})
    if len(kinds) > 1:
        return "kind is " + " or ".join(kinds)
    dumps = [part.model_dump() for part in parts]
    fields = [field for field in dumps[0] if any(dump[field] != dumps[0][field] for dump in dumps)]
    return ", ".join(f"{field} is {' or '.join(sorted({str(dump[field]) for dump in dumps}))}" for field in fields)
