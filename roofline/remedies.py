"""With how many devices, or in which precision, would a model fit that does not?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from membound.roofline.divisible import check_parallel
from membound.roofline.engine_memory import EngineLimits
from membound.roofline.errors import MemboundError
from membound.roofline.footprint import Footprint
from membound.roofline.models import ModelSpec
from membound.roofline.precision import PRECISIONS
from membound.roofline.techniques import EngineSetup

MOST_DOUBLINGS = 8
NARROWER = {"8-bit": "int8", "4-bit": "int4"}

# Bytes of the least cache of a deployment that is of any use.
LeastCache = Callable[[Footprint], float]


@dataclass(frozen=True)
class Question:
    """Does a set-up fit on devices of `memory_bytes`, in an engine of the limits, with the least cache `beside`?"""

    model: ModelSpec
    memory_bytes: float
    beside: LeastCache
    limits: EngineLimits | None = None

    def fits(self, setup: EngineSetup, limits: EngineLimits | None = None) -> bool:
        try:
            check_parallel(self.model, setup)
            held = Footprint.of(self.model, setup, limits or self.limits)
            return held.weights_bytes + self.beside(held) <= held.usable_bytes(self.memory_bytes)
        except MemboundError:
            return False


def remedies(
    model: ModelSpec,
    setup: EngineSetup,
    memory_bytes: float,
    beside: LeastCache,
    limits: EngineLimits | None = None,
) -> str:
    """What to give, as the end of a sentence; empty where nothing that is known helps.

    On devices of `memory_bytes`, in an engine of the limits; `beside` is the least cache that must fit beside the
    weights.
    """
    question = Question(model, memory_bytes, beside, limits)
    ways = (_seats, _cached_experts, _devices, _precisions)
    found = [remedy for way in ways for remedy in way(question, setup)]
    return f"; give {' or '.join(found)}" if found else ""


def _seats(question: Question, setup: EngineSetup) -> Iterator[str]:
    """Fewer sequences by halves, for whose rows of logits an engine reserves less."""
    limits = question.limits
    if limits is None or not math.isfinite(limits.sequences):
        return
    for halvings in range(1, MOST_DOUBLINGS + 1):
        fewer = limits.sequences // 2**halvings
        if fewer >= 1 and question.fits(setup, replace(limits, sequences=fewer)):
            yield f"engine.max_num_seqs {fewer * setup.parallel.dp:.0f}"
            return


def _cached_experts(question: Question, setup: EngineSetup) -> Iterator[str]:
    """The most experts that an engine which offloads them may keep on the device."""
    storage = setup.expert_storage
    if storage is None:
        return
    most = min(storage.cached, max((mixture.experts for mixture in question.model.mixtures), default=0))
    for cached in range(most - 1, 0, -1):
        if question.fits(replace(setup, expert_storage=replace(storage, cached=cached))):
            yield f"expert_offload {cached} cached_experts"
            return


def _devices(question: Question, setup: EngineSetup) -> Iterator[str]:
    """The fewest times as many devices that hold it: tensor parallelism as far as it goes, then stages."""
    tp, pp = setup.parallel.tp, setup.parallel.pp
    for doublings in range(1, MOST_DOUBLINGS + 1):
        for stages in range(doublings + 1):
            degrees = {"tp": tp << (doublings - stages), "pp": pp << stages}
            parallel = setup.parallel.model_copy(update=degrees)
            if question.fits(replace(setup, parallel=parallel)):
                given = ", ".join(f"parallel.{name} {value}" for name, value in degrees.items() if value > 1)
                yield f"{given} ({parallel.devices} devices)"
                return


def _precisions(question: Question, setup: EngineSetup) -> Iterator[str]:
    """The widest narrower format of the weights that holds it."""
    for words, name in NARROWER.items():
        narrower = replace(setup, precision=replace(setup.precision, weights=PRECISIONS[name]))
        if PRECISIONS[name].width < setup.weights.width and question.fits(narrower):
            yield f"{words} weights (weight_quantization)"
            return
