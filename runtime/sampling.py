"""Which token comes next, and how many drafted tokens are kept?"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from membound.kernels.base import ChainVerifier, Kernels
from membound.roofline.errors import MemboundError
from membound.simulator.scheduling.prefix import mixed_hash

TYPICAL_THRESHOLD, TYPICAL_SHARE = 0.09, 0.3


class Guesses(NamedTuple):
    """What was drafted for a sequence: a chain, or with `parents` a tree; -1 is the token before the first guess.

    `drawn_from` [guesses, vocab] are the distributions that the guesses were drawn from; of several guesses with one
    parent, each given that it is none of those before it. Without, nothing was drawn: a guess is certain.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    drawn_from: Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows of logits that verify them."""
        return 1 + len(self.tokens)

    def children(self) -> list[list[int]]:
        """The guesses that follow the token before the first guess, and each guess."""
        following: list[list[int]] = [[] for _ in range(self.rows)]
        for guess in range(len(self.tokens)):
            following[guess if self.parents is None else self.parents[guess] + 1].append(guess)
        return following


class Verified(NamedTuple):
    """What a sequence emits: the guesses that were accepted, which are a `path`, and one token more."""

    tokens: tuple[int, ...]
    path: tuple[int, ...]


class LogitsError(MemboundError):
    """Logits that are not numbers, in row `row`: no token follows from them."""

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row} of the logits holds NaN or infinity")
        self.row = row


class Sampler(Protocol):
    """Turns the logits of a sequence's newest token and of its guesses into emitted tokens."""

    def verify(self, logits: Tensor, guesses: list[Guesses]) -> list[Verified]:
        """What each sequence emits, with `guesses[i].rows` rows of `logits` [rows, vocab] for sequence i.

        Raises LogitsError for a row that holds NaN or infinity.
        """


class GreedySampler:
    """The most likely token; a guess is accepted when it is that token, so the output is plain greedy decoding's."""

    def verify(self, logits: Tensor, guesses: list[Guesses]) -> list[Verified]:
        chosen = logits.argmax(dim=-1, keepdim=True)
        # NaN and infinity are what argmax finds where they are. A GPU is waited for once, for both.
        best, numbers = torch.cat([chosen, logits.gather(1, chosen).isfinite()], dim=1).T.tolist()
        if not all(numbers):
            raise LogitsError(numbers.index(0))
        first, verified = 0, []
        for guess in guesses:
            verified.append(self._walk(guess, best[first : first + guess.rows]))
            first += guess.rows
        return verified

    def _walk(self, guess: Guesses, best: list[int]) -> Verified:
        def choose(row: int, children: list[int]) -> tuple[int, int | None]:
            token = best[row]
            return token, next((child for child in children if guess.tokens[child] == token), None)

        return _walk(guess, choose)


class TemperatureSampler:
    """Samples from softmax(logits / temperature); guesses pass modified rejection sampling, so the distribution holds.

    A guess x that was drawn from q is accepted with probability min(1, p(x) / q(x)), and otherwise the next guess is
    tried, or a token drawn, with norm(max(p - q, 0)) for p. A certain guess has q(x) = 1. Sources: Leviathan et al.,
    ICML 2023, algorithm 1; for several guesses of a token Miao et al., SpecInfer, ASPLOS 2024, algorithm 2.
    """

    def __init__(self, temperature: float, seed: int, device: torch.device | str = "cpu") -> None:
        self.temperature = temperature
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def verify(self, logits: Tensor, guesses: list[Guesses]) -> list[Verified]:
        probabilities = torch.softmax(logits / self.temperature, dim=-1)  # [rows, vocab]
        _check_numbers(probabilities[:, 0])  # softmax makes a whole row NaN where one of its logits is no number
        parts = probabilities.split([guess.rows for guess in guesses])
        return [self._verify(p, guess) for p, guess in zip(parts, guesses, strict=True)]

    def _verify(self, probabilities: Tensor, guess: Guesses) -> Verified:
        def choose(row: int, children: list[int]) -> tuple[int, int | None]:
            p = probabilities[row]
            for child in children:
                token = guess.tokens[child]
                q = None if guess.drawn_from is None else guess.drawn_from[child]
                drawn = torch.rand((), generator=self.generator, device=p.device)
                if drawn * (1.0 if q is None else q[token]) < p[token]:
                    return token, child
                p = _without(p, token, q)
            return self._sample(p), None

        return _walk(guess, choose)

    def _sample(self, weights: Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=self.generator))


class FusedSampler:
    """`TemperatureSampler` by the device's kernels, which say what all sequences emit at once; trees are left to it.

    A number of the random stream is used once: the seed of a step is mixed from the run's and the step's.
    """

    def __init__(self, plain: TemperatureSampler, verifier: ChainVerifier, seed: int) -> None:
        self.plain = plain
        self.verifier = verifier
        self.seed = seed
        self.steps = 0

    def verify(self, logits: Tensor, guesses: list[Guesses]) -> list[Verified]:
        if any(guess.parents is not None for guess in guesses):
            return self.plain.verify(logits, guesses)
        if not guesses:  # a step that computes parts of prompts emits nothing
            return []
        self.steps += 1
        device, edges = logits.device, [0]
        followed: list[int] = []
        for guess in guesses:
            edges.append(edges[-1] + guess.rows)
            followed += [*guess.tokens, 0]
        emitted = self.verifier(
            logits,
            torch.tensor(edges, dtype=torch.int32, device=device),
            torch.tensor(followed, device=device),
            torch.full((len(guesses),), self.plain.temperature, device=device),
            torch.tensor([mixed_hash(self.seed, self.steps) >> 1], device=device),
            most_rows=max(guess.rows for guess in guesses),
            draft_probabilities=_drawn_from(guesses, logits),
        )
        _check_numbers(logits.logsumexp(dim=-1))
        pairs = zip(emitted.tokens.tolist(), emitted.counts.tolist(), strict=True)
        return [Verified(tuple(tokens[:count]), tuple(range(count - 1))) for tokens, count in pairs]


class TypicalSampler(TemperatureSampler):
    """Accepts every guess that is typical of the model, so that the output is not distributed as without guesses.

    A guess x is accepted where p(x) > min(e, d exp(-H(p))); of all accepted paths the longest is taken. Source: Cai et
    al., Medusa, 2024, section 3.3.1; e = 0.09 and d = 0.3 as in the authors' code (from memory).
    """

    def _verify(self, probabilities: Tensor, guess: Guesses) -> Verified:
        entropy = torch.special.entr(probabilities).sum(dim=-1)  # [rows]
        least = torch.clamp(TYPICAL_SHARE * torch.exp(-entropy), max=TYPICAL_THRESHOLD).tolist()
        paths: dict[int, tuple[int, ...]] = {-1: ()}
        for child, token in enumerate(guess.tokens):
            parent = child - 1 if guess.parents is None else guess.parents[child]
            if parent in paths and float(probabilities[parent + 1, token]) > least[parent + 1]:
                paths[child] = (*paths[parent], child)
        path = max(paths.values(), key=len)
        last = self._sample(probabilities[path[-1] + 1 if path else 0])
        return Verified((*(guess.tokens[child] for child in path), last), path)


def _check_numbers(of_rows: Tensor) -> None:
    wrong = ~of_rows.isfinite()
    if bool(wrong.any()):
        raise LogitsError(int(wrong.int().argmax()))


def _walk(guess: Guesses, choose: Callable[[int, list[int]], tuple[int, int | None]]) -> Verified:
    """Follows the guesses for as long as `choose` takes one of those that come next, of which it is told the row."""
    tokens: list[int] = []
    path: list[int] = []
    following = guess.children()
    row = 0
    while True:
        token, child = choose(row, following[row])
        tokens.append(token)
        if child is None:
            return Verified(tuple(tokens), tuple(path))
        path.append(child)
        row = child + 1


def _drawn_from(guesses: list[Guesses], logits: Tensor) -> Tensor | None:
    """The distribution of the guess behind each row [rows, vocab]; None where all guesses are certain."""
    if all(guess.drawn_from is None for guess in guesses):
        return None
    rows = torch.zeros(logits.shape, device=logits.device)
    first = 0
    for guess in guesses:
        own = rows[first : first + len(guess.tokens)]
        if guess.drawn_from is not None:
            own.copy_(guess.drawn_from)
        else:
            own.scatter_(1, torch.tensor(guess.tokens, device=rows.device, dtype=torch.int64)[:, None], 1.0)
        first += guess.rows
    return rows


def _without(p: Tensor, token: int, q: Tensor | None) -> Tensor:
    """The distribution of a token that a rejected guess leaves."""
    if q is None:
        rest = p.clone()
        rest[token] = 0
    else:
        rest = (p - q).clamp(min=0)
    total = rest.sum()
    # Where q equals p to the last bit, nothing can be rejected but by rounding.
    return rest / total if total > 0 else p


def sampler_for(
    temperature: float,
    seed: int,
    device: torch.device | str,
    *,
    typical: bool = False,
    kernels: Kernels | None = None,
) -> Sampler:
    """Greedy at temperature 0, else the sampler of that temperature, on `kernels` where these can sample."""
    if temperature == 0:
        return GreedySampler()
    if typical:
        return TypicalSampler(temperature, seed, device)
    plain = TemperatureSampler(temperature, seed, device)
    verifier = None if kernels is None else kernels.chain_verifier
    return plain if verifier is None else FusedSampler(plain, verifier, seed)
