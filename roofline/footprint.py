"""What does a deployment hold on one device, its drafter included, and how many sequences fit beside that?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from membound.roofline.memory import MEMORY_SHARE, CacheTerms, cache_terms, weights_bytes
from membound.roofline.models import ModelSpec
from membound.roofline.techniques import EngineSetup

# What engines need beside weights and caches: activations, captured graphs, the libraries' own; of a small device a
# smaller part (assumed), as its batches and graphs are smaller too.
RESERVED_BYTES = 2e9
RESERVED_SHARE = 1 / 16


def cache_room(memory_bytes: float) -> float:
    """Bytes of a device that weights and caches may take together."""
    return memory_bytes * MEMORY_SHARE - min(RESERVED_BYTES, RESERVED_SHARE * memory_bytes)


@dataclass(frozen=True)
class Footprint:
    """Bytes of the model's weights and caches on one device, with those of the drafter that it has."""

    weights_bytes: float
    cache: CacheTerms
    drafter_weights_bytes: float = 0.0

    @classmethod
    def of(cls, model: ModelSpec, setup: EngineSetup) -> Footprint:
        """Raises MemboundError where the model cannot have the set-up's drafter."""
        weights, cache = weights_bytes(model, setup), cache_terms(model, setup)
        if setup.drafts is None:
            return cls(weights, cache)
        # Only set-ups that draft import what drafters cost.
        from membound.roofline.speculation.drafters import drafter_of

        drafter = drafter_of(model, setup.drafts, replace(setup, drafts=None))
        return cls(weights + drafter.weights_bytes(), cache + drafter.cache_terms(), drafter.weights_bytes())

    def room(self, memory_bytes: float) -> float:
        """Bytes that the weights leave for caches; below 0 where they do not fit."""
        return cache_room(memory_bytes) - self.weights_bytes

    def sequence_bytes(self, tokens: float) -> float:
        """Bytes of the caches of one sequence."""
        return float(self.cache.bytes(tokens))

    def sequences(self, memory_bytes: float, tokens: float) -> float:
        """Sequences of so many tokens whose caches fit; 0 where the weights do not."""
        each = self.sequence_bytes(tokens)
        return max(0.0, self.room(memory_bytes) // each) if each > 0 else math.inf
