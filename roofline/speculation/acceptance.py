"""How many drafted tokens are accepted, by the kind of content?

Text has predictable stretches, in which nearly every draft is right, and surprising ones, in which few are. The
profile is a Markov chain with those two states over the positions of the output; a draft is accepted with the
probability of the state of its position. One constant acceptance rate is the case of two equal states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from membound.roofline.part import Part


class AcceptanceProfile(Part):
    """Acceptance of a drafted token by state, and how many tokens a stretch of each state has on average.

    The closed forms hold for a chain of drafts that is verified from its first token on and ends at the first
    rejection, with `found` the chance that a step has a draft at all, independent of the state.
    """

    predictable_alpha: float = Field(ge=0, le=1)
    predictable_tokens: float = Field(ge=1, le=1e6)
    surprising_alpha: float = Field(ge=0, le=1)
    surprising_tokens: float = Field(ge=1, le=1e6)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.surprising_alpha > self.predictable_alpha:
            raise ValueError(
                f"surprising_alpha is {self.surprising_alpha}, above predictable_alpha ({self.predictable_alpha})"
            )
        return self

    @classmethod
    def constant(cls, alpha: float) -> AcceptanceProfile:
        """Every draft is accepted with the same chance, whatever was accepted before."""
        return cls(predictable_alpha=alpha, predictable_tokens=1, surprising_alpha=alpha, surprising_tokens=1)

    @property
    def alphas(self) -> NDArray[np.float64]:
        """Acceptance in the states (predictable, surprising)."""
        return np.array([self.predictable_alpha, self.surprising_alpha])

    @property
    def transitions(self) -> NDArray[np.float64]:
        """Chance of the next position's state (column) by the state of this one (row)."""
        leave = np.array([1 / self.predictable_tokens, 1 / self.surprising_tokens])
        return np.array([[1 - leave[0], leave[0]], [leave[1], 1 - leave[1]]])

    @property
    def predictable_share(self) -> float:
        """Share of the output's positions that are predictable."""
        return self.predictable_tokens / (self.predictable_tokens + self.surprising_tokens)

    @property
    def mean_alpha(self) -> float:
        """Acceptance of a draft at a random position."""
        share = self.predictable_share
        return share * self.predictable_alpha + (1 - share) * self.surprising_alpha

    def acceptance_by_position(
        self, drafts: int, found: float = 1.0, shares: Sequence[float] = ()
    ) -> NDArray[np.float64]:
        """Chance that draft 1 .. `drafts` of a step is accepted together with all before it.

        Each is right `shares` times as often as its state says, where they are given (`by_depth.py`), and never beyond
        the last of them.
        """
        step = self.transitions
        state, chances = self._first_state(drafts, found, shares), []
        for position in range(drafts):
            state = state @ self._accepted(position, shares)
            chances.append(state.sum())
            state = state @ step
        return np.array(chances)

    def expected_accepted(self, drafts: int, found: float = 1.0) -> float:
        """Accepted drafts in a step that had `drafts` of them.

        With one state it is Leviathan et al., ICML 2023, equation 1: (1 - a^(g+1)) / (1 - a), less the bonus token.
        """
        return float(self.acceptance_by_position(drafts, found).sum())

    def _accepted(self, position: int, shares: Sequence[float]) -> NDArray[np.float64]:
        """Chance of a guess at a position of a step by the state of its token."""
        if not shares:
            return np.diag(self.alphas)
        share = shares[position] if position < len(shares) else 0.0
        return np.diag(np.minimum(self.alphas * share, 1.0))

    def _first_state(self, drafts: int, found: float, shares: Sequence[float] = ()) -> NDArray[np.float64]:
        """Chances of the state of a step's first draft.

        Steps begin in surprising stretches more often than positions lie in them, since a step advances less there.
        Stationary distribution of the chain of first positions: k accepted drafts and a rejection at the next, or
        all drafts accepted and a bonus token, each moving the chain by one more position.
        """
        step = self.transitions
        reached, moved = np.eye(2), np.zeros((2, 2))
        for position in range(drafts):
            accepted = self._accepted(position, shares)
            moved += reached @ (np.eye(2) - accepted) @ step
            reached = reached @ accepted @ step
        moved = found * (moved + reached @ step) + (1 - found) * step
        to_surprising, to_predictable = moved[0, 1], moved[1, 0]
        if to_surprising + to_predictable == 0:
            # stretches of one token and steps of two: the first position's state is that of all first positions
            return np.array([self.predictable_share, 1 - self.predictable_share])
        return np.array([to_predictable, to_surprising]) / (to_predictable + to_surprising)
