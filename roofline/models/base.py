"""What do all parts of a model have in common: frozen fields, matrices with a shape, shards of one GPU, an error?"""

from __future__ import annotations

from typing import NamedTuple, Protocol, Self

from pydantic import BaseModel, ConfigDict

from membound.roofline.errors import MemboundError


class ModelError(MemboundError):
    """A model that is unknown, inconsistent or of a kind that membound does not support."""


class LinearShape(NamedTuple):
    """A linear layer y [m, n] = x [m, k] @ weight [n, k] transposed."""

    name: str
    n: int
    k: int


class Frozen(BaseModel):
    """A part of a model: its fields are facts and never change."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TokenMixer(Protocol):
    """What every kind of attention (or what stands in its place) says of one layer.

    `linears` are the matrices of one GPU when `tp` GPUs share each layer, fused as engines fuse them: column
    parallel on the way in, row parallel on the way out, and whole on every GPU where nothing can be split.
    A matrix that several GPUs hold counts on each of them.
    """

    @property
    def parts(self) -> tuple[TokenMixer, ...]:
        """The mixers that it consists of: itself, or those that stand side by side."""

    @property
    def kind(self) -> str: ...

    @property
    def window(self) -> int | None:
        """How many tokens back it sees; None: all of them."""

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that one token leaves in the KV cache."""

    @property
    def state_elements(self) -> int:
        """Elements of the state that a sequence keeps whatever its length, at `state_bits` bits each."""

    @property
    def state_bits(self) -> int: ...

    @property
    def conv_elements(self) -> int:
        """Elements of the last inputs that a short convolution keeps for a sequence, in the activations' precision."""

    def linears(self, hidden: int, tp: int = 1) -> tuple[LinearShape, ...]: ...

    def vectors(self, hidden: int) -> int:
        """Parameters outside the linears: biases, norms of q and k, convolutions, decay rates."""

    def kv_elements_on_gpu(self, tp: int) -> int:
        """`kv_elements_per_token` of one GPU of `tp`; what cannot be split lies on each of them."""

    def state_elements_on_gpu(self, tp: int) -> int:
        """`state_elements` of one GPU of `tp`."""


class Single:
    """A mixer that stands alone."""

    @property
    def parts(self) -> tuple[Self]:
        return (self,)


class WithoutState(Single):
    """A mixer that keeps a KV cache and nothing else."""

    @property
    def state_elements(self) -> int:
        return 0

    @property
    def state_bits(self) -> int:
        return 0

    @property
    def conv_elements(self) -> int:
        return 0

    def state_elements_on_gpu(self, tp: int) -> int:
        return 0


class WithoutKv(Single):
    """A mixer that keeps a state of constant size and no KV cache."""

    @property
    def window(self) -> None:
        return None

    @property
    def kv_elements_per_token(self) -> int:
        return 0

    def kv_elements_on_gpu(self, tp: int) -> int:
        return 0


def split(count: int, tp: int, what: str) -> int:
    """The share of one of `tp` GPUs; raises ModelError unless they share alike."""
    if tp < 1:
        raise ModelError(f"tp is {tp}: the number of GPUs that share a layer must be 1 or more.")
    if count % tp:
        divisors = ", ".join(str(one) for one in range(1, count + 1) if count % one == 0)
        raise ModelError(f"tp is {tp}, which does not divide {what} {count}: give one of {divisors}.")
    return count // tp


def split_or_copy(count: int, tp: int, what: str) -> int:
    """As `split`, but where GPUs outnumber the parts, several hold the same one (KV heads, state-space groups)."""
    if tp > count and tp % count == 0:
        return 1
    return split(count, tp, what)


def padded_share(count: int, tp: int) -> int:
    """The share of one GPU of a width that engines pad until `tp` divides it."""
    return -(-count // tp)
