"""Which of two requests goes first?

An order is a number for each sequence, known when it arrives: whoever has the smaller one goes first, ties by arrival.
Waiting does not change it. Ageing and slack need no more than that, since every waiting sequence ages by the same
second: the one that is ahead stays ahead. So a queue is a heap, and one that is preempted returns to its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from membound.simulator.scheduling.request import Sequence


class Order(Protocol):
    """Ranks the sequences of an engine. Pure."""

    def key(self, sequence: Sequence) -> float:
        """The smaller, the sooner it is served and the later it is preempted."""


@dataclass(frozen=True)
class FirstCome:
    """First come, first served."""

    def key(self, sequence: Sequence) -> float:
        return 0.0


@dataclass(frozen=True)
class PriorityWithAgeing:
    """The smallest priority number first; waiting `ageing_s` seconds is worth one step of priority.

    So nobody starves: a request waits for those that come up to `ageing_s` times the difference of priorities later,
    and for no others.
    """

    ageing_s: float

    def key(self, sequence: Sequence) -> float:
        return sequence.request.arrival_s + sequence.priority * self.ageing_s


@dataclass(frozen=True)
class EarliestDeadline:
    """The first token that is due first. Source: Liu and Layland, Journal of the ACM 20 (1973)."""

    def key(self, sequence: Sequence) -> float:
        return sequence.deadline_s


@dataclass(frozen=True)
class LeastSlack:
    """The prompt that must be begun first, at `seconds_per_token` of prefill, to be in time."""

    seconds_per_token: float

    def key(self, sequence: Sequence) -> float:
        return sequence.deadline_s - sequence.request.prompt_tokens * self.seconds_per_token
