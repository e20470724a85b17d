"""What does a deployment hold on one device, its drafter included, and how many sequences fit beside that?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from membound.roofline.memory import MEMORY_SHARE, CacheTerms, cache_terms, weights_bytes
from membound.roofline.models import ModelSpec
from membound.roofline.techniques import EngineSetup
from membound.roofline.times.engines import get_profile

# What engines that capture graphs need beside weights and caches: the graphs, activations, the libraries' own; of a
# small device a smaller part (assumed), as its batches and graphs are smaller too. Without graphs what is not used of
# the device is enough: the vLLM of 2023 gave 12 of 40 GiB to the cache beside OPT-13B, which with the weights are nine
# tenths (Kwon et al., SOSP 2023, table 1, from memory).
RESERVED_BYTES = 2e9
RESERVED_SHARE = 1 / 16


def cache_room(memory_bytes: float, profile: str, activation_bytes: float = 0.0) -> float:
    """Bytes of a device that weights and caches may take together in an engine of a profile.

    Activations are among what it reserves, as far as that goes.
    """
    reserved = min(RESERVED_BYTES, RESERVED_SHARE * memory_bytes) if get_profile(profile).graphs else 0.0
    return memory_bytes * MEMORY_SHARE - max(reserved, activation_bytes)


@dataclass(frozen=True)
class Footprint:
    """Bytes of the model's weights and caches on one device, with those of the drafter that it has.

    A sequence lives on one of the data-parallel `ranks`, whose caches are each other's equals and not shared.
    """

    weights_bytes: float
    cache: CacheTerms
    profile: str
    drafter_weights_bytes: float = 0.0
    ranks: int = 1

    @classmethod
    def of(cls, model: ModelSpec, setup: EngineSetup) -> Footprint:
        """Raises MemboundError where the model cannot have the set-up's drafter."""
        weights, cache, ranks = weights_bytes(model, setup), cache_terms(model, setup), setup.parallel.dp
        if setup.drafts is None:
            return cls(weights, cache, setup.profile, ranks=ranks)
        # Only set-ups that draft import what drafters cost.
        from membound.roofline.speculation.drafters import drafter_of

        drafter = drafter_of(model, setup.drafts, replace(setup, drafts=None))
        own = drafter.weights_bytes()
        return cls(weights + own, cache + drafter.cache_terms(), setup.profile, own, ranks)

    def room(self, memory_bytes: float) -> float:
        """Bytes that the weights leave for caches; below 0 where they do not fit."""
        return cache_room(memory_bytes, self.profile) - self.weights_bytes

    def sequence_bytes(self, tokens: float) -> float:
        """Bytes of the caches of one sequence on each device of its rank."""
        return float(self.cache.bytes(tokens))

    def sequences(self, memory_bytes: float, tokens: float) -> float:
        """Sequences of so many tokens whose caches fit, whole ones on each rank; 0 where the weights do not."""
        each = self.sequence_bytes(tokens)
        return self.ranks * max(0.0, self.room(memory_bytes) // each) if each > 0 else math.inf
