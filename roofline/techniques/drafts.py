"""What proposes tokens, how many in a step, and how many of them are right?

Only the description: `roofline/speculation/steps.py` says what drafting costs and yields, the scheduler and the runtime
build the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar, Literal

from membound.roofline.speculation.token_tree import MOST_BRANCHES, RANK_EXPONENT, TokenTree, best_tree, chain

DrafterKind = Literal["ngram", "draft_model", "self", "medusa", "eagle", "mtp"]


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """Guesses of a step: up to `gamma` tokens deep, as a chain, or as a tree of `nodes` tokens.

    In `hit_rate` of the steps there is a draft at all. The best guess at the first position is right with chance
    `alpha`, and where all before it were right, that at each further position with `decay` times the chance of the
    one before. That none of the first r guesses behind a token is right falls as r^-`rank_exponent`. Where the engine
    is `adaptive`, gamma is the most, and each step takes as many as have paid so far, or none. Where alpha is
    `assumed`, nobody gave it: it is the technique's usual one. Who drafts `apart` reads nothing that the model
    computes: chains that are looked up, or that another model writes.
    """

    kind: ClassVar[DrafterKind]
    apart: ClassVar[bool] = False

    gamma: int
    alpha: float
    decay: float = 1.0
    hit_rate: float = 1.0
    nodes: int | None = None
    rank_exponent: float = RANK_EXPONENT
    adaptive: bool = False
    assumed: bool = False

    @property
    def alphas(self) -> tuple[float, ...]:
        """The chance that the best guess is right, position by position."""
        return tuple(self.alpha * self.decay**position for position in range(self.gamma))

    @property
    def tree(self) -> TokenTree:
        """The guesses of a step that has any."""
        if self.nodes is None:
            return chain(self.alphas)
        return best_tree(self.alphas, self.tokens, exponent=self.rank_exponent)

    @property
    def tokens(self) -> int:
        """Drafted tokens that a step verifies for a sequence."""
        return self.gamma if self.nodes is None or self.gamma == 0 else self.nodes


@dataclass(frozen=True, kw_only=True)
class NgramDrafts(Drafts):
    """Prompt lookup: up to `gamma` tokens that followed the last occurrence of the newest `max_ngram` tokens."""

    kind = "ngram"
    apart = True

    max_ngram: int
    min_ngram: int


@dataclass(frozen=True, kw_only=True)
class ModelDrafts(Drafts):
    """A smaller model with the same vocabulary writes ahead; None is the smallest of the model's own family.

    `weights` are where its own come from and `format` what they are kept in; None is as the model's.
    """

    kind = "draft_model"
    apart = True

    draft: str | None
    weights: str | None = None
    format: str | None = None


@dataclass(frozen=True, kw_only=True)
class SelfDrafts(Drafts):
    """The first `layers` layers of the model write ahead, with its final norm, its lm_head and its cache."""

    kind = "self"

    layers: int | None


@dataclass(frozen=True, kw_only=True)
class HeadDrafts(Drafts):
    """A head that was trained for the model guesses; `head` is its file, None the one that comes with membound.

    It can guess `guessable` tokens, of which it shares the rows of the model's lm_head; None is all. What is `typical`
    of the model is accepted, rather than what leaves its distribution as it is.
    """

    head: str | None = None
    guessable: int | None = None
    typical: bool = False


@dataclass(frozen=True, kw_only=True)
class MedusaDrafts(HeadDrafts):
    """One head for each of `gamma` positions ahead, all from the same hidden state.

    Heads that guess all tokens have an lm_head each, as published ones do.
    """

    kind = "medusa"


@dataclass(frozen=True, kw_only=True)
class EagleDrafts(HeadDrafts):
    """One layer that continues the model's own hidden states, once for each of `gamma` positions.

    At each position it continues its `branches` most likely guesses, and which of all it keeps is known only behind
    the last (EAGLE-2, Li et al., 2024); a single branch is a chain.
    """

    kind = "eagle"

    @property
    def branches(self) -> int:
        return min(MOST_BRANCHES, ceil(self.tokens / self.gamma)) if self.gamma else 0

    @property
    def tree(self) -> TokenTree:
        if self.branches <= 1:
            return chain(self.alphas)
        return replace(super().tree, continued=(1, *[self.branches] * (self.gamma - 1)))


@dataclass(frozen=True, kw_only=True)
class MtpDrafts(Drafts):
    """The module that the model was trained with to predict the token after the next, used `gamma` times in a row."""

    kind = "mtp"
