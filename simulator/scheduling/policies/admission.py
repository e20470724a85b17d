"""Which requests are turned away when they arrive, although they would fit?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from membound.simulator.scheduling.request import Sequence

# Prompt tokens that are waiting to be computed before a sequence's own; worked out only where it is asked for.
TokensAhead = Callable[[Sequence], int]


class Admission(Protocol):
    """Decides on a sequence that arrives at `sequence.request.arrival_s`. Pure."""

    def refusal(self, sequence: Sequence, waiting: int, tokens_ahead: TokensAhead) -> str | None:
        """Why it is turned away behind `waiting` others, or None."""


@dataclass(frozen=True)
class Everybody:
    """Nobody is turned away."""

    def refusal(self, sequence: Sequence, waiting: int, tokens_ahead: TokensAhead) -> str | None:
        return None


@dataclass(frozen=True)
class ShortQueue:
    """At most `most` requests wait."""

    most: int

    def refusal(self, sequence: Sequence, waiting: int, tokens_ahead: TokensAhead) -> str | None:
        return f"{waiting} requests wait, and at most {self.most} may" if waiting >= self.most else None


@dataclass(frozen=True)
class InTime:
    """Nobody waits in vain: who cannot have the first token when it is due, even if all steps were prompts, goes."""

    seconds_per_token: float

    def refusal(self, sequence: Sequence, waiting: int, tokens_ahead: TokensAhead) -> str | None:
        allowed_s = sequence.deadline_s - sequence.request.arrival_s
        needed_s = (tokens_ahead(sequence) + sequence.tokens) * self.seconds_per_token
        if needed_s <= allowed_s:
            return None
        return f"its first token takes {needed_s:.3g} s or more, but is due after {allowed_s:.3g} s"


@dataclass(frozen=True)
class Strict:
    """Whoever one of several rules turns away is turned away."""

    rules: tuple[Admission, ...]

    def refusal(self, sequence: Sequence, waiting: int, tokens_ahead: TokensAhead) -> str | None:
        reasons: Iterable[str | None] = (rule.refusal(sequence, waiting, tokens_ahead) for rule in self.rules)
        return next((reason for reason in reasons if reason), None)
