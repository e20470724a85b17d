"""Which drafts of a request are accepted, where only the kind of its content is known?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from membound.roofline.speculation.acceptance import AcceptanceProfile
from membound.simulator.scheduling.workload.streams import stream

PREDICTABLE, SURPRISING = 0, 1


class AcceptanceSampler:
    """Draws, for each position of a request's output, whether a draft there is accepted.

    The draws follow from (seed, request, position) alone, so a request meets the same content under every schedule
    and draft length, and in macro-steps as in single ones. A position is drafted at most once: after a rejection the
    model's own token stands there.
    """

    def __init__(self, profile: AcceptanceProfile, seed: int) -> None:
        self.profile = profile
        self.seed = seed
        self._right: dict[int, NDArray[np.bool_]] = {}

    def accepted(self, request: int, output_tokens: int, position: int, drafts: int) -> int:
        """How many of `drafts` drafts, the first of them for output token `position`, are accepted."""
        right = self._right.get(request)
        if right is None:
            right = self._right[request] = self.right(request, output_tokens)
        wrong = np.flatnonzero(~right[position : position + drafts])
        return int(wrong[0]) if len(wrong) else drafts

    def ended(self, request: int) -> None:
        """Nothing more will be asked of `request`."""
        self._right.pop(request, None)

    def right(self, request: int, output_tokens: int) -> NDArray[np.bool_]:
        """For each output token of a request, whether a draft of it would be accepted."""
        rng = stream(self.seed, f"acceptance {request}")
        surprising = self._surprising(output_tokens, rng)
        return rng.random(output_tokens) < self.profile.alphas[surprising.astype(np.int64)]

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
