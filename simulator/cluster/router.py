"""Which replica should answer a request?

Load is in tokens, prompts and wanted outputs of the requests that a replica has not answered: what a router knows that
sees requests come and answers go.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from typing import Protocol

from membound.roofline.scenario.cluster import DEFAULT_LOAD_BOUND, Cluster
from membound.simulator.scheduling.prefix import Span
from membound.simulator.scheduling.request import Request


class Candidate(Protocol):
    """What a router may know of a replica."""

    number: int
    unanswered_tokens: int
    step_tokens: int

    def cached_blocks(self, prefix: list[Span]) -> int:
        """How many of a prompt's blocks, from the first on, its prefix cache holds."""


class Router(Protocol):
    """Chooses among replicas that take requests, at least one, in order of their numbers."""

    def choose(self, request: Request, replicas: Items[Candidate]) -> int:
        """The index of the chosen one."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: Request, replicas: Items[Candidate]) -> int:
        index = next((i for i, replica in enumerate(replicas) if replica.number > self._last), 0)
        self._last = replicas[index].number
        return index


class Random:
    """Each with the same chance."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, request: Request, replicas: Items[Candidate]) -> int:
        return self._random.randrange(len(replicas))


class LeastLoaded:
    """The one with the least load; the first of those."""

    def choose(self, request: Request, replicas: Items[Candidate]) -> int:
        return min(range(len(replicas)), key=lambda index: replicas[index].unanswered_tokens)


class PowerOfTwo:
    """The less loaded of two that are drawn (Mitzenmacher, IEEE TPDS 12, 2001)."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, request: Request, replicas: Items[Candidate]) -> int:
        if len(replicas) == 1:
            return 0
        drawn = self._random.sample(range(len(replicas)), 2)
        return min(drawn, key=lambda index: replicas[index].unanswered_tokens)


class PrefixAware:
    """The one that has most of the prompt in its cache; of equal ones, and where none has any, the least loaded.

    A replica with more than `load_bound` times the mean load, and one step's tokens besides, is passed over: a step is
    what a request may wait for anyway.
    """

    def __init__(self, load_bound: float, block_size: int) -> None:
        self.load_bound = load_bound
        self.block_size = block_size

    def choose(self, request: Request, replicas: Items[Candidate]) -> int:
        prefix: list[Span] = []
        if request.prefix is not None:
            prefix = request.prefix.spans(self.block_size, request.prompt_tokens)
        bound = self.load_bound * sum(replica.unanswered_tokens for replica in replicas) / len(replicas)

        def worth(index: int) -> tuple[int, int]:
            return replicas[index].cached_blocks(prefix), -replicas[index].unanswered_tokens

        near = [i for i, one in enumerate(replicas) if one.unanswered_tokens <= bound + one.step_tokens]
        return max(near, key=worth)


def router_for(cluster: Cluster, seed: int, block_size: int) -> Router:
    """The router that a cluster asks for."""
    match cluster.router:
        case "round_robin":
            return RoundRobin()
        case "random":
            return Random(seed)
        case "least_loaded":
            return LeastLoaded()
        case "power_of_two":
            return PowerOfTwo(seed)
        case "prefix_aware":
            return PrefixAware(cluster.load_bound or DEFAULT_LOAD_BOUND, block_size)
