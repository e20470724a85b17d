"""Which tokens would a cheap guess propose next?"""

from __future__ import annotations

import random
from typing import Protocol

from membound.roofline.techniques import Drafts, NgramDrafts
from membound.simulator.scheduling.request import Sequence


class Drafter(Protocol):
    """Proposes tokens for a sequence in decode, from what the scheduler knows of it alone."""

    def draft(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        """At most `limit` proposed tokens; empty where there is nothing to propose."""


def prompt_lookup(token_ids: list[int], max_ngram: int, min_ngram: int, limit: int) -> tuple[int, ...]:
    """The tokens that followed the latest earlier occurrence of the longest suffix that occurred before.

    Suffixes of `max_ngram` down to `min_ngram` tokens are tried; at most `limit` tokens are returned.
    Source: Saxena, prompt lookup decoding (2023); the same rule as vLLM's n-gram proposer.
    """
    end = len(token_ids)
    if limit <= 0:
        return ()
    for size in range(min(max_ngram, end - 1), min_ngram - 1, -1):
        suffix = token_ids[end - size :]
        for start in range(end - size - 1, -1, -1):
            if token_ids[start : start + size] == suffix:
                return tuple(token_ids[start + size : start + size + limit])
    return ()


class NgramDrafter:
    """Prompt lookup over the sequence's own tokens."""

    def __init__(self, drafts: NgramDrafts) -> None:
        self.drafts = drafts

    def draft(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        assert sequence.token_ids is not None, "prompt lookup needs the tokens"
        d = self.drafts
        return prompt_lookup(sequence.token_ids, d.max_ngram, d.min_ngram, min(d.gamma, limit))


class ModelledDrafter:
    """Stands for a drafter where nobody knows what it would propose: a draft is found in `hit_rate` of the steps."""

    def __init__(self, drafts: Drafts, seed: int) -> None:
        self.drafts = drafts
        self.seed = seed

    def draft(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        # Drawn from (seed, request, position), so a request meets the same content under every schedule.
        hit = random.Random(f"{self.seed}/{sequence.id}/{sequence.tokens}").random() < self.drafts.hit_rate
        return (0,) * min(self.drafts.gamma, limit) if hit else ()
