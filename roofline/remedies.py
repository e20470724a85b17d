"""Which number of devices, or which precision, would hold a model that does not fit?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from membound.roofline.divisible import check_parallel
from membound.roofline.errors import MemboundError
from membound.roofline.footprint import Footprint
from membound.roofline.models import ModelSpec
from membound.roofline.precision import PRECISIONS
from membound.roofline.techniques import EngineSetup

MOST_DOUBLINGS = 8
NARROWER = {"8-bit": "int8", "4-bit": "int4"}

# Bytes of the least cache of a deployment that is of any use.
LeastCache = Callable[[Footprint], float]


def remedies(
    model: ModelSpec,
    setup: EngineSetup,
    room_bytes: float,
    beside: LeastCache,
) -> str:
    """What to give, as the end of a sentence; empty where nothing that is known helps.

    On each device weights and caches have `room_bytes`; `beside` is the least cache that must fit beside the weights.
    """
    ways = (_cached_experts, _devices, _precisions)
    found = [remedy for way in ways for remedy in way(model, setup, room_bytes, beside)]
    return f"; give {' or '.join(found)}" if found else ""


def _fits(model: ModelSpec, setup: EngineSetup, room_bytes: float, beside: LeastCache) -> bool:
    try:
        check_parallel(model, setup)
        held = Footprint.of(model, setup)
        return held.weights_bytes + beside(held) <= room_bytes
    except MemboundError:
        return False


def _cached_experts(model: ModelSpec, setup: EngineSetup, room_bytes: float, beside: LeastCache) -> Iterator[str]:
    """The most experts that an engine which offloads them may keep on the device."""
    storage = setup.expert_storage
    if storage is None:
        return
    most = min(storage.cached, max((mixture.experts for mixture in model.mixtures), default=0))
    for cached in range(most - 1, 0, -1):
        if _fits(model, replace(setup, expert_storage=replace(storage, cached=cached)), room_bytes, beside):
            yield f"expert_offload {cached} cached_experts"
            return


def _devices(model: ModelSpec, setup: EngineSetup, room_bytes: float, beside: LeastCache) -> Iterator[str]:
    """The fewest times as many devices that hold it: tensor parallelism as far as it goes, then stages."""
    tp, pp = setup.parallel.tp, setup.parallel.pp
    for doublings in range(1, MOST_DOUBLINGS + 1):
        for stages in range(doublings + 1):
            degrees = {"tp": tp << (doublings - stages), "pp": pp << stages}
            parallel = setup.parallel.model_copy(update=degrees)
            if _fits(model, replace(setup, parallel=parallel), room_bytes, beside):
                given = ", ".join(f"parallel.{name} {value}" for name, value in degrees.items() if value > 1)
                yield f"{given} ({parallel.devices} devices)"
                return


def _precisions(model: ModelSpec, setup: EngineSetup, room_bytes: float, beside: LeastCache) -> Iterator[str]:
    """The widest narrower format of the weights that holds it."""
    for words, name in NARROWER.items():
        narrower = replace(setup, precision=replace(setup.precision, weights=PRECISIONS[name]))
        if PRECISIONS[name].width < setup.weights.width and _fits(model, narrower, room_bytes, beside):
            yield f"{words} weights (weight_quantization)"
            return
