"""How long does a deployment take for requests that are all there at once, and whose outputs are not equally long?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from membound.roofline.serving import Deployment, mean_context


@dataclass(frozen=True)
class Burst:
    """`requests` requests without another after them, `places` of which are served at a time.

    Outputs are taken to be exponential, as those of chats nearly are: whatever a sequence has made, as much is left on
    average. As long as requests wait, each end makes room for the next. Then places empty, one by one: with n left the
    next end is `output_tokens` / n steps away, so that the last of many takes as many times the mean as the harmonic
    number says, 6.3 of 300. Most of a short run's time may pass with few sequences.
    """

    deployment: Deployment
    requests: float
    places: float
    prompt_tokens: float
    output_tokens: float

    @property
    def _served_s(self) -> float:
        """Seconds of a request while all places are taken, its prompt among those of others."""
        prompt_s = self.deployment.joining_s(self.places, self.prompt_tokens, self.output_tokens)
        return float(prompt_s) + self.output_tokens * self.deployment.decode_s(self.places, self._context) / self.places

    @property
    def _context(self) -> float:
        return mean_context(self.prompt_tokens, 2.0 * self.output_tokens)

    @cached_property
    def emptying_s(self) -> float:
        """Seconds from when nobody waits any more to the last end."""
        left = np.unique(np.concatenate((np.arange(1.0, 33.0), np.geomspace(32.0, max(self.places, 32.0), 48).round())))
        left = left[left <= self.places]
        token_s = np.asarray(self.deployment.token_s(left, self._context)) * np.ones_like(left)
        each = np.arange(1.0, np.floor(self.places) + 1.0)
        return self.output_tokens * float(np.sum(np.interp(each, left, token_s) / each))

    @cached_property
    def latency_s(self) -> float:
        """Seconds from the arrival of all to the last end."""
        first_s = self.deployment.prefill_s(self.places, self.prompt_tokens)
        waiting = max(self.requests - self.places, 0.0)
        return first_s + waiting * self._served_s + self.emptying_s

    @property
    def output_tokens_per_s(self) -> float:
        return self.requests * self.output_tokens / self.latency_s
