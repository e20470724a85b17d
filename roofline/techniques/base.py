"""What does every technique say of itself: its layer and family, what it is compared with, what it changes?"""

from __future__ import annotations

from typing import ClassVar, Literal

from membound.roofline.part import Part
from membound.roofline.techniques.setup import EngineSetup

Layer = Literal["weights", "kv", "kernels", "schedule", "steps"]
Family = Literal[
    "move fewer bytes",
    "move less data",
    "use a read more than once",
    "take fewer steps",
    "compute less per step",
    "wait less",
]
GainMetric = Literal["tpot_s", "output_tokens_per_s"]


class Technique(Part):
    """Common to all techniques: what it is, what it is compared with, and its change to the set-up.

    The plain engine has a `usual` technique by itself, as every engine of today does; it is compared with the engine
    that `remove` leaves. One that `sets_weights` takes the place of the formats in which the model is published.
    """

    layer: ClassVar[Layer]
    family: ClassVar[Family]
    title: ClassVar[str]
    baseline: ClassVar[str]
    lossless: ClassVar[bool]
    gain_metric: ClassVar[GainMetric]
    usual: ClassVar[bool] = False
    sets_weights: ClassVar[bool] = False

    name: str

    def apply(self, setup: EngineSetup) -> EngineSetup:
        """The set-up with this technique switched on; raises MemboundError where the two exclude each other."""
        raise NotImplementedError

    @classmethod
    def compared_with(cls, before: EngineSetup) -> str:
        """What the technique is compared with where `before` is the engine without it, in words."""
        return cls.baseline

    @classmethod
    def remove(cls, setup: EngineSetup) -> EngineSetup:
        """The set-up without a usual technique; of any other the set-up as it is."""
        return setup

    def needs_batch(self) -> bool:
        """Whether the technique is without meaning at a batch of one."""
        return False
