"""What of a step's batch decides its cost? A few sums, never the batch itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Count = float | NDArray[np.float64]


@dataclass(frozen=True)
class StepShape:
    """The sums of a step; each a number, or an array with one entry a step.

    For sequences that each bring `q` new tokens behind `p` cached ones: `tokens` = sum of q; `sequences`; `kv_tokens`
    = sum of (p + q), what attention reads; `attended` = sum of q*p + q*(q+1)/2, the query-key pairs of causal
    attention; `logits_rows`, the positions whose logits are needed.
    """

    tokens: Count
    sequences: Count
    kv_tokens: Count
    attended: Count
    logits_rows: Count

    @classmethod
    def decode(cls, batch: Count, context: Count) -> StepShape:
        """One new token for each of `batch` sequences; `context` counts the new token too."""
        return cls.verify(batch, context, 0)

    @classmethod
    def verify(cls, batch: Count, context: Count, drafts: Count) -> StepShape:
        """One new token and `drafts` guesses for each of `batch` sequences, `context` tokens in all for each."""
        q = 1 + drafts
        cached = context - q
        return cls(batch * q, batch, batch * context, batch * (q * cached + q * (q + 1) / 2), batch * q)

    @classmethod
    def prefill(cls, batch: Count, prompt_tokens: Count) -> StepShape:
        """`batch` prompts of `prompt_tokens` tokens each, nothing cached."""
        pairs = prompt_tokens * (prompt_tokens + 1) / 2
        return cls(batch * prompt_tokens, batch, batch * prompt_tokens, batch * pairs, batch)

    @classmethod
    def of(cls, parts: Iterable[tuple[int, int, int]]) -> StepShape:
        """From one (cached tokens, new tokens, logits rows) for each sequence of the step."""
        tokens = sequences = kv_tokens = attended = logits_rows = 0.0
        for cached, new, rows in parts:
            tokens += new
            sequences += 1
            kv_tokens += cached + new
            attended += new * cached + new * (new + 1) / 2
            logits_rows += rows
        return cls(tokens, sequences, kv_tokens, attended, logits_rows)

    def columns(self) -> dict[str, Any]:
        """The sums by name, for a table of steps."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
