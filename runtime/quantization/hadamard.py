"""Which matrices of ones and minus ones rotate vectors of a given length, and how are they applied fast?

Sylvester's doubling, and Paley's constructions from the quadratic residues of a finite field, computed here
(R. Paley, On orthogonal matrices, 1933). What a length leaves over is rotated by a random orthogonal matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from membound.runtime.quantization.quantized import QuantizationError

_LARGEST_FACTOR = 512  # the part of a length that is multiplied as a dense matrix


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix [k, k]: signs, then the Kronecker product of a Sylvester matrix and `factor`."""

    signs: Tensor  # [k], 1 or -1
    sylvester: Tensor  # [p, p] orthogonal, p a power of two
    factor: Tensor  # [q, q] orthogonal, k = p * q

    @property
    def size(self) -> int:
        return len(self.signs)

    def to(self, device: torch.device) -> Rotation:
        """The same on a device; applied to what lies there, it copies nothing, so that a GPU need not be waited for."""
        return Rotation(self.signs.to(device), self.sylvester.to(device), self.factor.to(device))

    def apply(self, x: Tensor) -> Tensor:
        """x [..., k] times the matrix, in fp32."""
        p, q = len(self.sylvester), len(self.factor)
        signs, sylvester, factor = (part.to(x.device) for part in (self.signs, self.sylvester, self.factor))
        y = (x.float() * signs).unflatten(-1, (p, q))
        return (sylvester @ (y @ factor)).flatten(-2)


def rotation(size: int, seed: int | None = None) -> Rotation:
    """A rotation of vectors of `size`: Hadamard where a construction is known, with random signs where `seed` is given.

    Where none is known, the odd part is rotated by a random orthogonal matrix of the seed (0 without one).
    """
    if size < 1:
        raise QuantizationError(f"size is {size}; a rotation needs at least one channel")
    generator = torch.Generator().manual_seed(seed or 0)
    signs = torch.ones(size)
    if seed is not None:
        signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
    odd = size
    while odd % 2 == 0:
        odd //= 2
    known = (odd * 2**doublings for doublings in range(size.bit_length()) if size % (odd * 2**doublings) == 0)
    for order in known:
        if (matrix := _paley(order)) is not None:
            return Rotation(signs, _sylvester(size // order), matrix / order**0.5)
    if odd > _LARGEST_FACTOR:
        raise QuantizationError(f"vectors of {size} channels cannot be rotated fast: {odd} of them are left over")
    dense, upper = torch.linalg.qr(torch.randn(odd, odd, generator=generator, dtype=torch.float64))
    dense = dense * upper.diagonal().sign()  # without this the distribution would not be uniform
    return Rotation(signs, _sylvester(size // odd), dense.float())


def _sylvester(order: int) -> Tensor:
    """The orthogonal matrix of Sylvester's construction, order a power of two; symmetric."""
    matrix = torch.ones(1, 1)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / order**0.5


@cache
def _paley(order: int) -> Tensor | None:
    """A Hadamard matrix [order, order] of entries 1 and -1 over a field of prime size; None where there is none."""
    if order == 1:
        return torch.ones(1, 1)
    if order > _LARGEST_FACTOR or order % 4:
        return None
    if _is_prime(order - 1):  # first construction: primes that are 3 modulo 4
        core = torch.nn.functional.pad(_residues(order - 1), (1, 0, 1, 0))
        core[0, 1:], core[1:, 0] = 1, -1
        return core + torch.eye(order)
    half = order // 2
    if _is_prime(half - 1) and (half - 1) % 4 == 1:  # second: primes that are 1 modulo 4
        core = torch.nn.functional.pad(_residues(half - 1), (1, 0, 1, 0))
        core[0, 1:], core[1:, 0] = 1, 1
        entries, diagonal = torch.tensor([[1.0, 1], [1, -1]]), torch.tensor([[1.0, -1], [-1, -1]])
        return torch.kron(core, entries) + torch.kron(torch.eye(half), diagonal)
    return None


def _residues(prime: int) -> Tensor:
    """Jacobsthal's matrix [prime, prime]: 1 where the difference of the indices is a square, -1 where not, 0 alike."""
    squares = {i * i % prime for i in range(1, prime)}
    character = torch.tensor([0.0] + [1.0 if i in squares else -1.0 for i in range(1, prime)])
    i = torch.arange(prime)
    return character[(i[:, None] - i[None, :]) % prime]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
