"""Which drafted tokens would have been accepted?"""

from __future__ import annotations

import random
from typing import Protocol

from membound.roofline.techniques import NgramDrafts
from membound.simulator.scheduling.request import Sequence, Work


class Content(Protocol):
    """Knows, or models, what the model would write."""

    def emitted(self, work: Work, sequence: Sequence) -> tuple[int, ...]:
        """The tokens that `sequence` emits in a step: the accepted drafts and one more."""


class RecordedContent:
    """The continuation was recorded: a draft is accepted when it is what the model wrote."""

    def emitted(self, work: Work, sequence: Sequence) -> tuple[int, ...]:
        outputs = sequence.request.output_ids
        assert outputs is not None, "recorded content needs the output tokens"
        ahead = outputs[sequence.emitted : sequence.emitted + len(work.drafts) + 1]
        accepted = 0
        while accepted < len(work.drafts) and work.drafts[accepted] == ahead[accepted]:
            accepted += 1
        return ahead[: accepted + 1]


class ModelledContent:
    """Nobody knows the text: each draft is accepted with probability alpha until one is not."""

    def __init__(self, drafts: NgramDrafts | None, seed: int) -> None:
        self.alpha = drafts.alpha if drafts else 0.0
        self.seed = seed

    def emitted(self, work: Work, sequence: Sequence) -> tuple[int, ...]:
        if not work.drafts:
            return (0,)
        draw = random.Random(f"{self.seed}/{sequence.id}/{sequence.tokens}/accept").random
        accepted = 0
        while accepted < len(work.drafts) and draw() < self.alpha:
            accepted += 1
        return (0,) * (accepted + 1)
