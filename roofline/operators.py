"""What does an operator compute, move and send?

Amounts are of one call, and a multiply-add counts as two FLOPs (Williams et al., Roofline, CACM 2009).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from membound.roofline.hardware.links import Groups, once_each
from membound.roofline.precision import PRECISIONS, Precision
from membound.roofline.shape import AttentionPart, Count, is_there
from membound.roofline.tiles import Tiles

Kind = Literal[
    "linear",
    "attention",
    "moe",
    "recurrent",
    "rms_norm",
    "add_rms_norm",
    "rope_and_store",
    "silu_mul",
    "embed",
    "scores",
    "collective",
    "expert_moves",
    "host",
]
NO_PART = AttentionPart(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Operator:
    """One operator of a step: `calls` equal calls, each with these FLOPs and bytes.

    The roofline needs no more than that; the further fields of a kind are what its kernel's efficiency depends on.
    `elements` is what the time of an elementwise kernel grows with besides bytes; `tiles` are those of the prompts'
    attention, where they are not those of equal prompts.
    """

    name: str
    kind: Kind
    calls: int
    flops: Count = 0.0
    weight_bytes: Count = 0.0
    kv_bytes: Count = 0.0
    activation_bytes: Count = 0.0
    link_bytes: Count = 0.0
    m: Count = 0.0
    n: int = 0
    k: int = 0
    precision: Precision | None = None
    activations: Precision | None = None
    elements: Count = 0.0
    sequences: Count = 0.0
    logits: Count = 0.0
    heads: AttentionHeads | None = None
    decode: AttentionPart = NO_PART
    prefill: AttentionPart = NO_PART
    tiles: Tiles | None = None
    experts: ExpertLoad | None = None
    collective: Collective | None = None
    moves: ExpertMoves | None = None
    mixer: str = ""  # the kind of layer whose state a `recurrent` operator updates

    @property
    def bytes(self) -> Count:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    def repeated(self, times: Count) -> Operator:
        """With what so many such calls compute, move and send."""
        amounts = ("flops", "weight_bytes", "kv_bytes", "activation_bytes", "link_bytes")
        return replace(self, **{name: getattr(self, name) * times for name in amounts})


@dataclass(frozen=True)
class AttentionHeads:
    """Heads of one device: a KV stream is read once for all of its queries; of `latents` by all heads of MLA.

    Heads that give `scores_only` multiply in the format of the keys, and read no values.
    """

    heads: int
    kv_heads: int
    kv_bytes_per_token: Count
    flops_per_pair: float
    qk_and_v_dims: int
    kv: Precision
    latents: bool = False
    scores_only: bool = False


@dataclass(frozen=True)
class ExpertLoad:
    """What the routed experts of one device compute: (token, expert) pairs, and distinct experts among them.

    `present` are the pairs of all tokens that the device has, those of other devices' experts too.
    """

    pairs: Count
    active: Count
    flops_per_row: float
    bytes_per_expert: float
    present: Count


@dataclass(frozen=True)
class Collective:
    """A message among `ranks` devices, each `stride` from the next; `message_bytes` as nccl-tests counts them.

    One `in_layers` has the rest of the layers around it, behind whose computing another batch may hide it. Of a token
    an all-to-all counts so many `copies`, of which each device, and each node over the network, gets one; where experts
    are in `groups`, those that have one of the token's.
    """

    operation: Literal["allreduce", "allgather", "reducescatter", "alltoall", "sendrecv"]
    message_bytes: Count
    ranks: int
    in_layers: bool = True
    copies: Count = 1.0
    stride: int = 1
    groups: Groups | None = None


@dataclass(frozen=True)
class ExpertMoves:
    """`missing` experts come from the `place` where all lie, at `bytes_per_s` or as fast as the device is reached."""

    missing: Count
    place: Literal["host", "disk"]
    bytes_per_s: float | None


def linear(
    name: str,
    calls: int,
    m: Count,
    n: int,
    k: int,
    weights: Precision,
    activation_bytes: float,
    activations: Precision = PRECISIONS["bf16"],
) -> Operator:
    """y [m, n] = x [m, k] W^T: 2 m n k FLOPs; reads W once whatever m is, and not at all in steps without rows."""
    return Operator(
        name,
        "linear",
        calls,
        flops=2.0 * m * n * k,
        weight_bytes=matrix_bytes(weights, n, k) * is_there(m),
        activation_bytes=m * (n + k * min(activations.bits / 16.0, 1.0)) * activation_bytes,
        m=m,
        n=n,
        k=k,
        precision=weights,
        activations=activations,
    )


@lru_cache(maxsize=4096)
def matrix_bytes(weights: Precision, n: int, k: int) -> float:
    return weights.matrix_bytes(n, k)


def message(
    name: str,
    calls: int,
    operation: str,
    message_bytes: Count,
    ranks: int,
    *,
    in_layers: bool = True,
    copies: Count = 1.0,
    stride: int = 1,
    groups: Groups | None = None,
) -> Operator:
    collective = Collective(operation, message_bytes, ranks, in_layers, copies, stride, groups)  # type: ignore[arg-type]
    passes = {"allreduce": 2.0, "sendrecv": 1.0}.get(operation, 1.0)
    share: Count = 1.0 if operation == "sendrecv" else (ranks - 1) / ranks
    if operation == "alltoall":
        share = share * once_each(ranks, copies, groups)
    return Operator(name, "collective", calls, link_bytes=passes * share * message_bytes, collective=collective)


def elementwise(
    name: str, kind: Kind, calls: int, elements: Count, moved_bytes: Count, kv_bytes: Count = 0.0
) -> Operator:
    return Operator(name, kind, calls, kv_bytes=kv_bytes, activation_bytes=moved_bytes, elements=elements)
