"""For how many tokens does a request reserve blocks when it joins?"""

from __future__ import annotations

from dataclasses import dataclass

from membound.roofline.scenario.engine import Reservation
from membound.simulator.scheduling.request import Request


def power_of_two(tokens: int) -> int:
    """The smallest power of two that is at least `tokens`."""
    return 1 << (tokens - 1).bit_length()


@dataclass(frozen=True)
class Reserving:
    """All blocks of `tokens` at once, in `chunks` those of the next power of two; None takes them one by one.

    "oracle" knows a request's length, "pow2" takes an output of the next power of two. The model takes no more than
    `max_context` tokens.
    """

    tokens: int | Reservation | None = None
    chunks: bool = False
    max_context: int | None = None

    def of(self, request: Request) -> int | None:
        """Tokens whose blocks a request takes when it joins, or None where blocks come one by one."""
        match self.tokens:
            case None:
                return None
            case "oracle":
                tokens = request.tokens
            case "pow2":
                doubled = request.prompt_tokens + power_of_two(request.output_tokens)
                tokens = min(doubled, self.max_context or doubled)
            case number:
                tokens = number
        return power_of_two(tokens) if self.chunks else tokens

    def held(self, request: Request, tokens: int) -> int:
        """Tokens whose blocks are taken for a request that has `tokens` of them."""
        return self.of(request) or tokens
