"""What does a deployment hold on one device, its drafter included, and how many sequences fit beside that?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from membound.roofline.engine_memory import EngineLimits, EngineMemory, padding_bytes
from membound.roofline.memory import CacheTerms, cache_terms, weights_bytes
from membound.roofline.models import ModelSpec
from membound.roofline.techniques import EngineSetup


@dataclass(frozen=True)
class Footprint:
    """Bytes of the model's weights and caches on one device, with those of the drafter that it has.

    A sequence lives on one of the data-parallel `ranks`, whose caches are each other's equals and not shared.
    """

    weights_bytes: float
    cache: CacheTerms
    engine: EngineMemory
    drafter_weights_bytes: float = 0.0
    ranks: int = 1

    @classmethod
    def of(cls, model: ModelSpec, setup: EngineSetup, limits: EngineLimits | None = None) -> Footprint:
        """In an engine of these limits, which is what it reserves for.

        Raises MemboundError where the model cannot have the set-up's drafter.
        """
        weights = weights_bytes(model, setup) + padding_bytes(model, setup)
        cache, engine, ranks = cache_terms(model, setup), EngineMemory.of(model, setup, limits), setup.parallel.dp
        if setup.drafts is None:
            return cls(weights, cache, engine, ranks=ranks)
        # Only set-ups that draft import what drafters cost.
        from membound.roofline.speculation.drafters import drafter_of

        drafter = drafter_of(model, setup.drafts, replace(setup, drafts=None))
        own = drafter.weights_bytes()
        return cls(weights + own, cache + drafter.cache_terms(), engine, own, ranks)

    def room(self, memory_bytes: float) -> float:
        """Bytes that the weights leave for caches; below 0 where they do not fit."""
        return self.usable_bytes(memory_bytes) - self.weights_bytes

    def usable_bytes(self, memory_bytes: float, activation_bytes: float = 0.0) -> float:
        """Bytes of a device that weights and caches may take together, beside so many activations."""
        return self.engine.usable_bytes(memory_bytes, activation_bytes)

    def sequence_bytes(self, tokens: float) -> float:
        """Bytes of the caches of one sequence on each device of its rank."""
        return float(self.cache.bytes(tokens))

    def sequences(self, memory_bytes: float, tokens: float) -> float:
        """Sequences of so many tokens whose caches fit, whole ones on each rank; 0 where the weights do not."""
        each, most = self.sequence_bytes(tokens), math.inf
        if each > 0:
            most = max(0.0, self.room(memory_bytes) // each)
        if seat := self.engine.seat_bytes:  # limited by nothing but memory, each takes rows of logits too
            beside = self.room(memory_bytes) + self.engine.spared_bytes
            most = min(most, max(0.0, beside // (each + seat)))
        return self.ranks * most
