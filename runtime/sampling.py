"""Which token comes next, and how many drafted tokens are kept?"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Sampler(Protocol):
    """Turns the logits of a sequence's last token and of its drafts into emitted tokens."""

    def verify(self, logits: Tensor, sizes: list[int], drafts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """For sequences with `sizes[i]` = 1 + len(drafts[i]) rows of `logits` [sum(sizes), vocab]: what each emits.

        That is the accepted prefix of its drafts and one token more.
        """


class GreedySampler:
    """The most likely token; a draft is accepted when it is that token, so the output is plain greedy decoding's."""

    def verify(self, logits: Tensor, sizes: list[int], drafts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        best = logits.argmax(dim=-1).tolist()
        emitted, row = [], 0
        for size, guess in zip(sizes, drafts, strict=True):
            accepted = 0
            while accepted < len(guess) and guess[accepted] == best[row + accepted]:
                accepted += 1
            emitted.append(tuple(best[row : row + accepted + 1]))
            row += size
        return emitted


class TemperatureSampler:
    """Samples from softmax(logits / temperature); drafts pass modified rejection sampling, so the distribution holds.

    A draft is a point mass, so token x is accepted with probability p(x) and otherwise replaced by a sample of p
    without x. Source: Leviathan et al., ICML 2023, algorithm 1, with q a point mass.
    """

    def __init__(self, temperature: float, seed: int, device: torch.device | str = "cpu") -> None:
        self.temperature = temperature
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def verify(self, logits: Tensor, sizes: list[int], drafts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        probabilities = torch.softmax(logits / self.temperature, dim=-1)  # [rows, vocab]
        parts = probabilities.split(sizes)
        return [self._verify(p, guess) for p, guess in zip(parts, drafts, strict=True)]

    def _verify(self, probabilities: Tensor, guess: tuple[int, ...]) -> tuple[int, ...]:
        for position, token in enumerate(guess):
            p = probabilities[position]
            if torch.rand((), generator=self.generator, device=p.device) >= p[token]:
                rest = p.clone()
                rest[token] = 0
                return (*guess[:position], self._sample(rest))
        return (*guess, self._sample(probabilities[len(guess)]))

    def _sample(self, weights: Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=self.generator))


def sampler_for(temperature: float, seed: int, device: torch.device | str) -> Sampler:
    """Greedy at temperature 0, else the sampler of that temperature."""
    return GreedySampler() if temperature == 0 else TemperatureSampler(temperature, seed, device)
