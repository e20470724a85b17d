"""Which guesses of a drafter make the tree that a step verifies?"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from membound.simulator.scheduling.request import Draft


class Guess(NamedTuple):
    """A token, its chance and that of all before it together, and the guess that it follows (-1: the newest token)."""

    token: int
    chance: float
    parent: int


def best_draft(guesses: Sequence[Guess], count: int) -> Draft:
    """The `count` guesses with the largest chances, in that order; parents stand before their children in `guesses`.

    A guess is never more likely than its parent, so the best ones are a tree (EAGLE-2, Li et al., 2024).
    """
    order = sorted(range(len(guesses)), key=lambda index: (-guesses[index].chance, index))[:count]
    place = {index: i for i, index in enumerate(order)} | {-1: -1}
    return Draft(tuple(guesses[index].token for index in order), tuple(place[guesses[index].parent] for index in order))


def independent_draft(ranked: Sequence[Sequence[tuple[int, float]]], count: int) -> Draft:
    """The best `count` guesses where `ranked[d]` are tokens and chances at depth d whatever is before (Medusa).

    Each depth has its guesses in the order of their chances. Best first: of all guesses that could be added the one
    with the largest chance, as in `roofline.token_tree.best_tree`, with the chances of this very step.
    """
    tokens: list[int] = []
    parents: list[int] = []
    # (negative chance, order of arrival, chance of the parent, parent, depth, rank)
    open_guesses: list[tuple[float, int, float, int, int, int]] = []
    arrivals = 0

    def offer(above: float, parent: int, depth: int, rank: int) -> None:
        nonlocal arrivals
        if depth < len(ranked) and rank < len(ranked[depth]):
            arrivals += 1
            chance = above * ranked[depth][rank][1]
            heapq.heappush(open_guesses, (-chance, arrivals, above, parent, depth, rank))

    offer(1.0, -1, 0, 0)
    while open_guesses and len(tokens) < count:
        negative, _, above, parent, depth, rank = heapq.heappop(open_guesses)
        tokens.append(ranked[depth][rank][0])
        parents.append(parent)
        offer(above, parent, depth, rank + 1)
        offer(-negative, len(tokens) - 1, depth + 1, 0)
    return Draft(tuple(tokens), tuple(parents))
