"""Which number of devices, or which precision, would hold a model that does not fit?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from membound.roofline.errors import MemboundError
from membound.roofline.memory import weights_bytes
from membound.roofline.models import ModelSpec
from membound.roofline.precision import PRECISIONS
from membound.roofline.step import check_parallel
from membound.roofline.techniques import EngineSetup

MOST_DOUBLINGS = 8
NARROWER = {"8-bit": "int8", "4-bit": "int4"}


def remedies(
    model: ModelSpec,
    setup: EngineSetup,
    usable_bytes: float,
    beside: Callable[[EngineSetup], float],
) -> str:
    """What to give, as the end of a sentence; empty where nothing that is known helps.

    On each device `beside` are the bytes of the least cache that the weights leave room for.
    """
    found = [*_devices(model, setup, usable_bytes, beside), *_precisions(model, setup, usable_bytes, beside)]
    return f"; give {' or '.join(found)}" if found else ""


def _fits(model: ModelSpec, setup: EngineSetup, usable_bytes: float, beside: Callable[[EngineSetup], float]) -> bool:
    try:
        check_parallel(model, setup)
        return weights_bytes(model, setup) + beside(setup) <= usable_bytes
    except MemboundError:
        return False


def _devices(
    model: ModelSpec, setup: EngineSetup, usable_bytes: float, beside: Callable[[EngineSetup], float]
) -> Iterator[str]:
    """The fewest times as many devices that hold it: tensor parallelism as far as it goes, then stages."""
    tp, pp = setup.parallel.tp, setup.parallel.pp
    for doublings in range(1, MOST_DOUBLINGS + 1):
        for stages in range(doublings + 1):
            degrees = {"tp": tp << (doublings - stages), "pp": pp << stages}
            parallel = setup.parallel.model_copy(update=degrees)
            if _fits(model, replace(setup, parallel=parallel), usable_bytes, beside):
                given = ", ".join(f"parallel.{name} {value}" for name, value in degrees.items() if value > 1)
                yield f"{given} ({parallel.devices} devices)"
                return


def _precisions(
    model: ModelSpec, setup: EngineSetup, usable_bytes: float, beside: Callable[[EngineSetup], float]
) -> Iterator[str]:
    """The widest narrower format of the weights that holds it."""
    for words, name in NARROWER.items():
        narrower = replace(setup, precision=replace(setup.precision, weights=PRECISIONS[name]))
        if PRECISIONS[name].width < setup.weights.width and _fits(model, narrower, usable_bytes, beside):
            yield f"{words} weights (weight_quantization)"
            return
