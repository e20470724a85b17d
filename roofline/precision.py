"""How many bytes does a weight, an activation or a cached key really take?"""

from __future__ import annotations

from dataclasses import dataclass

from membound.roofline.errors import MemboundError


@dataclass(frozen=True)
class Precision:
    """A number format with its metadata.

    `bits` is what one element stores; `row_bits` is what each row of a weight matrix adds (scales).
    """

    name: str
    bits: float
    row_bits: float = 0.0

    def matrix_bytes(self, n: int, k: int) -> float:
        """Bytes of a weight matrix [n, k], scales included."""
        return n * (k * self.bits + self.row_bits) / 8

    def vector_bytes(self, elements: float) -> float:
        """Bytes of `elements` activations or cached values."""
        return elements * self.bits / 8


PRECISIONS = {
    p.name: p
    for p in (
        Precision("fp32", 32),
        Precision("bf16", 16),
        Precision("fp16", 16),
        Precision("fp8", 8),
        Precision("int8", 8, row_bits=32),
    )
}


def get_precision(name: str) -> Precision:
    """The precision called `name`; raises MemboundError for an unknown one."""
    try:
        return PRECISIONS[name]
    except KeyError:
        raise MemboundError(f"precision '{name}' is unknown; known are {', '.join(PRECISIONS)}") from None
