"""Which guesses should a step verify, and how many of them will be right?

A chain has one guess a position. A tree has several: a node is right when all on its path are, so that its chance is
the product along the path, and one step verifies all nodes at once.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

# The chance that none of a node's first r guesses is right falls as r^-b: Sequoia (Chen et al., 2024, from memory)
# finds a power law for several drafters. b is the median of those with which chains of a drafter lead to its trees.
# Of a tree that is always the same: 0.44 to 0.60 for six models (EAGLE, ICML 2024, table 5). One that grows where the
# drafter is sure in this very step accepts more than its average chances say: 0.74 to 1.14 for two models
# (`tests/roofline/published/trees.csv` has all pairs).
RANK_EXPONENT = 0.54
GROWN_RANK_EXPONENT = 0.85
# Guesses of one node that are considered: the drafters' top-k.
MOST_BRANCHES = 10


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens of a step with `gamma` guesses in a row, each right with chance `alpha`: Leviathan et al., Fast Inference
    from Transformers via Speculative Decoding, ICML 2023, equation 1."""
    return gamma + 1.0 if alpha == 1.0 else (1.0 - alpha ** (gamma + 1)) / (1.0 - alpha)


@dataclass(frozen=True)
class TokenTree:
    """Nodes in the order of their chances: the chance that a node and all before it are right, and its depth.

    Who drafts continues the nodes that have children; or `continued`, so many at each depth, where it learns only
    behind the last pass which of them it keeps.
    """

    chances: tuple[float, ...]
    depths: tuple[int, ...]
    parents: tuple[int, ...]
    continued: tuple[int, ...] | None = None

    @property
    def nodes(self) -> int:
        return len(self.chances)

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        return max(self.depths, default=0)

    @property
    def expected_accepted(self) -> float:
        """Nodes that a step accepts: each adds its chance, since no two nodes of a depth can both be right."""
        return float(sum(self.chances))

    @property
    def acceptance_by_depth(self) -> tuple[float, ...]:
        """The chance that a step accepts at least 1, 2 .. depth tokens."""
        return tuple(
            sum(chance for chance, depth in zip(self.chances, self.depths, strict=True) if depth == level)
            for level in range(1, self.depth + 1)
        )

    @property
    def conditional_by_depth(self) -> tuple[float, ...]:
        """The chance that a step accepts a token at depth 1, 2 .. where it accepted all before."""
        reached = (1.0, *self.acceptance_by_depth)
        return tuple(here / before if before else 0.0 for before, here in itertools.pairwise(reached))

    @property
    def expanded_by_depth(self) -> tuple[int, ...]:
        """Nodes that the drafter continues, at depth 0 (the last token that is known), 1 .. depth - 1."""
        if self.continued is not None:
            return self.continued
        continued = {(self.depths[parent] if parent >= 0 else 0, parent) for parent in self.parents}
        return tuple(sum(1 for depth, _ in continued if depth == level) for level in range(self.depth))


def rank_chances(alpha: float, branches: int = MOST_BRANCHES, exponent: float = RANK_EXPONENT) -> tuple[float, ...]:
    """The chance that the first, second .. guess of a node is right, where that of the first is `alpha`.

    The guesses are in the order of their chances, so that none is above the one before it.
    """
    missed = (1.0 - alpha) * np.arange(1.0, branches + 1.0) ** -exponent
    return tuple(float(chance) for chance in np.minimum.accumulate([alpha, *(missed[:-1] - missed[1:])]))


@lru_cache(maxsize=1024)
def best_tree(
    alphas: tuple[float, ...], nodes: int, branches: int = MOST_BRANCHES, exponent: float = RANK_EXPONENT
) -> TokenTree:
    """The tree of at most `nodes` nodes that accepts the most, where `alphas` are the best guesses' at each depth.

    Best first: of the nodes that could be added, the one with the largest chance. As chances fall along a path and
    from guess to guess, no other tree of the same size accepts more (the rule by which EAGLE-2 and Medusa build
    theirs, from the drafter's confidence or from a calibration set).
    """
    ranked = [rank_chances(alpha, branches, exponent) for alpha in alphas]
    chances: list[float] = []
    depths: list[int] = []
    parents: list[int] = []
    # (negative chance, order of arrival, chance of the parent, parent, depth, rank)
    open_nodes: list[tuple[float, int, float, int, int, int]] = []
    arrivals = 0

    def offer(above: float, parent: int, depth: int, rank: int) -> None:
        nonlocal arrivals
        if depth <= len(ranked) and rank < branches:
            arrivals += 1
            heapq.heappush(open_nodes, (-above * ranked[depth - 1][rank], arrivals, above, parent, depth, rank))

    offer(1.0, -1, 1, 0)
    while open_nodes and len(chances) < nodes:
        negative, _, above, parent, depth, rank = heapq.heappop(open_nodes)
        chances.append(-negative)
        depths.append(depth)
        parents.append(parent)
        offer(above, parent, depth, rank + 1)
        offer(-negative, len(chances) - 1, depth + 1, 0)
    return TokenTree(tuple(chances), tuple(depths), tuple(parents))


def chain(alphas: Sequence[float]) -> TokenTree:
    """One guess a position."""
    return best_tree(tuple(alphas), len(alphas), branches=1)
