"""In which precisions, and over how many of its kind, can a device hold a model?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from membound.roofline.applicable import has_kv_cache
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec
from membound.roofline.models import ModelSpec
from membound.roofline.parallel import Parallelism
from membound.roofline.techniques import W8A8, KvQuantization, Technique, WeightQuantization

MOST_DEVICES = 32


class FormatChoice(NamedTuple):
    """A choice of number formats; `given` is what the scenario's techniques say."""

    name: str
    techniques: tuple[Technique, ...]

    @property
    def lossy(self) -> tuple[Technique, ...]:
        """Techniques with which it is no longer the same model in quality."""
        return tuple(technique for technique in self.techniques if not technique.lossless)

    @property
    def lossless(self) -> bool:
        return not self.lossy


def precisions(
    names: Sequence[str], model: ModelSpec, device: HardwareSpec, given: tuple[Technique, ...]
) -> Iterator[FormatChoice]:
    """The named choices that this model has on this device; raises MemboundError for a name that is none.

    Weights that are published in no more bits stay as they are: DeepSeek-V3 has 8, gpt-oss 4.
    """
    rest = tuple(technique for technique in given if technique.layer not in ("weights", "kv"))
    for name in names:
        if name == "given":
            yield FormatChoice(name, given)
        elif name == "8bit":
            eight = "fp8" if device.computes_in("fp8") else "int8"
            if device.computes_in(eight):
                cache = (KvQuantization(format=eight),) if has_kv_cache(model) else ()
                yield FormatChoice(name, (*rest, *_narrowed(model, 8, W8A8.suited(device)), *cache))
        elif name == "4bit":
            yield FormatChoice(name, (*rest, *_narrowed(model, 4, WeightQuantization.suited(device))))
        else:
            raise MemboundError(f"precision '{name}' is unknown; give given, 8bit or 4bit")


def _narrowed(model: ModelSpec, bits: int, technique: Technique) -> tuple[Technique, ...]:
    return (technique,) if model.published.weights.width > bits else ()


def parallelisms(model: ModelSpec, device: HardwareSpec) -> Iterator[Parallelism]:
    """Degrees of tensor, pipeline, data and expert parallelism of a replica, the fewest devices first.

    Tensor parallelism stays where links are direct; stages and experts may go on to other nodes. Dense models are not
    divided by dp: that is what replicas are.
    """
    near = device.scale_up.max_devices if device.scale_up else 1
    divides_experts = bool(model.mixtures)
    found = []
    for tp, pp, dp in ((2**a, 2**b, 2**c) for a in range(6) for b in range(4) for c in range(6)):
        devices = tp * pp * dp
        if devices > MOST_DEVICES or tp > near or (devices > near and device.scale_out is None):
            continue
        if dp > 1 and (not divides_experts or pp > 1):
            continue
        found.append(Parallelism(tp=tp, pp=pp, dp=dp, ep=1))
        if divides_experts and tp * dp > 1:
            found.append(Parallelism(tp=tp, pp=pp, dp=dp, ep=tp * dp))
    return iter(sorted(found, key=lambda parallel: (parallel.devices, parallel.pp, parallel.dp)))
