"""What does a chain of guesses yield where each is right with the same chance, and how long should it be?

Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023: with acceptance a and g guesses
a step emits E = (1 - a^(g+1)) / (1 - a) tokens, and is E / (g c + v) times as fast as plain decoding, where c is what a
guess costs and v what verification costs, both against a plain step.
"""

from __future__ import annotations

import math

MOST_GUESSES = 32


def expected_tokens(alpha: float, gamma: int) -> float:
    """E of Leviathan et al., equation 1: tokens of a step with `gamma` guesses, each right with chance `alpha`."""
    return gamma + 1.0 if alpha == 1.0 else (1.0 - alpha ** (gamma + 1)) / (1.0 - alpha)


def chain_speedup(alpha: float, gamma: int, c: float, v: float = 1.0) -> float:
    """E / (g c + v); theorem 3.8 of Leviathan et al. where v = 1."""
    return expected_tokens(alpha, gamma) / (gamma * c + v)


def stationary_gamma(alpha: float, c: float) -> float:
    """The real g at which E / (g c + 1) is largest: (-A - W(-e^-A)) / u - 1, u = -ln a, A = 1 + u (1/c - 1).

    W is the lower branch of Lambert's function. With y = -W it is y - ln y = A, so that nothing underflows, and
    g = ln(y) / u - 1. Below 0 where no guess is worth its cost, infinite where guesses are free or always right.
    """
    if alpha <= 0.0:
        return -1.0
    if alpha >= 1.0 or c <= 0.0:
        return math.inf
    u = -math.log(alpha)
    a = 1.0 + u * (1.0 / c - 1.0)
    if a <= 1.0:
        return -1.0
    y = a + math.log(a) + 1.0
    for _ in range(50):  # Newton; y - ln y is convex, and the start lies above the root
        step = (y - math.log(y) - a) / (1.0 - 1.0 / y)
        y -= step
        if step <= 1e-14 * y:
            break
    return math.log(y) / u - 1.0


def best_chain(alpha: float, c: float, most: int = MOST_GUESSES) -> int:
    """The whole number of guesses with the largest E / (g c + 1), 0 where none is worth it."""
    real = min(max(stationary_gamma(alpha, c), 0.0), float(most))
    return max((math.floor(real), math.ceil(real)), key=lambda gamma: chain_speedup(alpha, gamma, c))
