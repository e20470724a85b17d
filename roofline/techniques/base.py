"""What does every technique say of itself: what it changes, what it is compared with, where it helps, what it costs?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from membound.roofline.parallel import Parallelism
from membound.roofline.part import Part
from membound.roofline.techniques.quality import LOSSLESS, Quality
from membound.roofline.techniques.setup import EngineSetup

if TYPE_CHECKING:
    from membound.roofline.hardware import HardwareSpec
    from membound.roofline.models import ModelSpec

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
Attacked = Literal["memory_weights", "memory_kv", "compute", "link"]


class Technique(Part):
    """Common to all techniques: what it is, what it is compared with, and its change to the set-up.

    The plain engine has a `usual` technique by itself, as every engine of today does; it is compared with the engine
    that `remove` leaves. One that `sets_weights` takes the place of the formats in which the model is published, and
    one that `needs_batch` is without meaning at a batch of one. It `attacks` bounds that it makes smaller, or whose
    time it uses more than once; one that attacks none may say in `works_by` where its gain is from. `meant_by` are the
    names that papers and engines have for it, without hyphens and underscores, and the fields that they stand for.
    """

    layer: ClassVar[Layer]
    family: ClassVar[Family]
    title: ClassVar[str]
    baseline: ClassVar[str]
    lossless: ClassVar[bool]
    gain_metric: ClassVar[GainMetric]
    usual: ClassVar[bool] = False
    sets_weights: ClassVar[bool] = False
    needs_batch: ClassVar[bool] = False
    attacks: ClassVar[tuple[Attacked, ...]] = ()
    works_by: ClassVar[str] = ""
    meant_by: ClassVar[Mapping[str, str]] = {}

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

    @classmethod
    def suited(cls, hardware: HardwareSpec) -> Self:
        """As it is by default, in the format that the device is made for."""
        return cls.model_validate({})

    @classmethod
    def advised(cls, model: ModelSpec, hardware: HardwareSpec, parallel: Parallelism) -> Self | None:
        """As an advisor would try it, None where it has nothing to work on or another one is nearer."""
        return cls.suited(hardware)

    @property
    def quality(self) -> Quality:
        """Its price in quality: of the published or measured figures the nearest one."""
        assert self.lossless, f"{self.name} is lossy and has a price"
        return LOSSLESS
