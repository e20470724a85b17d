"""Which drafts of a request are accepted, where only the kind of its content is known?"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from membound.roofline.speculation.acceptance import AcceptanceProfile
from membound.simulator.scheduling.workload.streams import stream

PREDICTABLE, SURPRISING = 0, 1
# Requests whose draws are kept; those of others are drawn again.
_KEPT = 4096


class AcceptanceSampler:
    """Draws, for each position of a request's output, how right a draft there must be to be accepted.

    A draft at depth d of a step is right `shares[d]` times as often as the profile says, and never beyond the last of
    them; as often where none are given. The draws follow from (seed, request, position) alone, so a request meets the
    same content under every schedule and draft length, and in macro-steps as in single ones. A position is drafted at
    most once: after a rejection the model's own token stands there.
    """

    def __init__(self, profile: AcceptanceProfile, seed: int, shares: Sequence[float] = ()) -> None:
        self.profile = profile
        self.seed = seed
        self._shares: Iterable[float] = tuple(shares) if shares else repeat(1.0)
        self._needed: dict[int, array[float]] = {}

    def accepted(self, request: int, output_tokens: int, position: int, drafts: int) -> int:
        """How many of `drafts` drafts, the first of them for output token `position`, are accepted."""
        needed = self._needed.get(request)
        if needed is None:
            if len(self._needed) >= _KEPT:  # those drawn first have most likely ended
                del self._needed[next(iter(self._needed))]
            needed = self._needed[request] = array("d", self._shares_needed(request, output_tokens).tobytes())
        right = 0
        for least, share in zip(needed[position : position + drafts], self._shares, strict=False):
            if least >= share:
                break
            right += 1
        return right

    def _shares_needed(self, request: int, output_tokens: int) -> NDArray[np.float64]:
        """For each output token of a request, the share of its state's acceptance from which on a draft is right."""
        rng = stream(self.seed, f"acceptance {request}")
        surprising = self._surprising(output_tokens, rng)
        alphas = self.profile.alphas[surprising.astype(np.int64)]
        never = np.full(output_tokens, np.inf)
        return np.divide(rng.random(output_tokens), alphas, out=never, where=alphas > 0)

    def _surprising(self, output_tokens: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        """Whether each position is surprising: stretches of geometric length, from the stationary state on."""
        profile = self.profile
        first = PREDICTABLE if rng.random() < profile.predictable_share else SURPRISING
        means = np.array([profile.predictable_tokens, profile.surprising_tokens])
        lengths: list[NDArray[np.int64]] = []
        pairs = 8 + int(2 * output_tokens / means.sum())
        while sum(int(part.sum()) for part in lengths) < output_tokens:
            order = means if first == PREDICTABLE else means[::-1]
            lengths.append(rng.geometric(1 / order, (pairs, 2)).ravel())
        stretch = np.repeat(np.arange(sum(map(len, lengths))), np.concatenate(lengths))[:output_tokens]
        return (stretch + first) % 2 == SURPRISING
