"""What must a set of kernels promise, whatever device it runs on?

The runtime's decoder is written against `Kernels` alone. `reference.TorchKernels` is the plain
PyTorch meaning of every operation; a faster set (C++ on the CPU, Triton on a GPU) must agree with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import torch
from torch import Tensor

from membound.kernels.by_head import ByHeadKernels
from membound.kernels.paged import PagedKernels
from membound.kernels.recurrences import RecurrentKernels
from membound.kernels.routing import GroupedLinear, Routing, RoutingRule

if TYPE_CHECKING:
    from membound.kernels.kivi import KiviBlocks

# fp32 and bf16 as they are; int8 to int2: integer codes; w8a8 and w4a8: int8 and int4, multiplied with activations
# rounded to int8; fp8: e4m3; sparse24: two of four numbers in bf16; q4_k and q6_k: GGUF's blocks; mxfp4: OCP's e2m1.
WeightFormat = Literal[
    "fp32", "bf16", "int8", "int4", "int3", "int2", "w8a8", "w4a8", "fp8", "sparse24", "q4_k", "q6_k", "mxfp4"
]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)

# gelu_tanh: the approximation by tanh (Hendrycks and Gimpel 2016, arXiv 1606.08415).
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared", "softplus"]


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A linear layer's weight [n, k] in the layout that its kernel reads; `quantize.py` says what the numbers mean.

    A row's `scale` and `offset` hold for `group_size` of its elements, or for all of them where that is None. Where
    `interleaved`, rows lie 16 at a time, a 32-bit word of each beside the next, and so do their scales and offsets.
    """

    format: WeightFormat
    data: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None
    group_size: int | None = None
    size: tuple[int, int] | None = None  # (n, k) where the shape of `data` is another
    interleaved: bool = False
    kept: Tensor | None = None  # sparse24: [n, k / 8] uint8, bit i of byte j where element 8 j + i is one of the two

    @property
    def shape(self) -> tuple[int, int]:
        if self.size is not None:
            return self.size
        n, k = self.data.shape
        return n, k

    @property
    def nbytes(self) -> int:
        parts = (self.data, self.scale, self.offset, self.kept)
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True)
class RaggedBatch:
    """Where the tokens of one step live: prefill chunks, decode tokens and drafts in one ragged batch.

    Sequence `i` brings query tokens `query_start[i] : query_start[i + 1]`, which are the last of its
    `context_len[i]` tokens, and attends causally to all of those. Its token `t` is stored in block
    `block_table[i, t // block_size]` at offset `t % block_size`.

    With a `tree` (at most 64 new tokens a sequence) a token sees the whole context before the new tokens, and of the
    new tokens its ancestors and itself. A sequence whose first query has position 0 starts with a fresh state.
    """

    positions: Tensor  # [tokens] int64, position of each token in its sequence
    slots: Tensor  # [tokens] int64, block * block_size + offset where each token's K and V are stored
    query_start: Tensor  # [sequences + 1] int32
    context_len: Tensor  # [sequences] int32, tokens of the sequence including this step's
    block_table: Tensor  # [sequences, max_blocks] int32, unused entries are 0
    most_queries: int | None = None  # the most tokens that a sequence brings, where the host knows it
    seats: Tensor | None = None  # [sequences] int64, where each sequence's state of constant size lies
    tree: Tensor | None = None  # [tokens] int64, bit j: the token sees new token j of its sequence; None: causal

    def to(self, device: torch.device) -> RaggedBatch:
        """The same batch on a device."""
        if self.positions.device == device:
            return self
        return RaggedBatch(
            positions=self.positions.to(device),
            slots=self.slots.to(device),
            query_start=self.query_start.to(device),
            context_len=self.context_len.to(device),
            block_table=self.block_table.to(device),
            most_queries=self.most_queries,
            seats=None if self.seats is None else self.seats.to(device),
            tree=None if self.tree is None else self.tree.to(device),
        )

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def queries_at_most(self) -> int:
        """The most tokens that a sequence brings, or may: where the host does not know, the others bring one each."""
        return self.most_queries or max(1, self.num_tokens - self.num_sequences + 1)

    @property
    def num_sequences(self) -> int:
        return self.context_len.shape[0]


def chain_of(query_start: Tensor, tokens: int) -> Tensor:
    """The `tree` [tokens] of drafts that follow one another: token j of a sequence sees its tokens 0 to j."""
    rows = torch.arange(tokens, dtype=torch.int32, device=query_start.device)
    sequence = torch.searchsorted(query_start, rows, right=True) - 1
    place = (rows - query_start[sequence]).long()
    # All bits up to the place's own; the 64th is the sign, and -1 has them all.
    return -1 ^ (torch.full_like(place, -2) << place)


@dataclass(frozen=True, eq=False)
class DeltaNetVectors:
    """What a gated DeltaNet layer learned for each value head, both [heads] in fp32; `a` is negative."""

    a: Tensor
    dt_bias: Tensor


@dataclass(frozen=True, eq=False)
class Mamba2Vectors:
    """What a Mamba-2 layer learned for each head, all [heads] in fp32; `a` is negative."""

    dt_bias: Tensor
    a: Tensor
    d: Tensor


class BlockCopier(Protocol):
    """Copies blocks of several tensors."""

    def __call__(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies, in every tensor, the first block of each pair to the second; all are read before any is written."""


class ChainVerifier(Protocol):
    """Verifies chains of drafts, and draws, on the device."""

    def __call__(
        self,
        logits: Tensor,
        row_start: Tensor,
        drafts: Tensor,
        temperature: Tensor,
        seed: Tensor,
        *,
        most_rows: int,
        draft_probabilities: Tensor | None = None,
    ) -> Emitted:
        """Modified rejection sampling of chains of drafts.

        Sequence i has rows `row_start[i]` to `row_start[i + 1]` (int32), at most `most_rows`, of logits [rows, vocab];
        row r is followed by `drafts[r]` (int64), but a sequence's last by none. `temperature` is [sequences] (fp32).
        `draft_probabilities` [rows, vocab] (fp32) are the distributions that the drafts were drawn from; without, they
        are certain. `seed` [1] (int64) differs from call to call.
        """


@dataclass(frozen=True, eq=False)
class Emitted:
    """`tokens` [sequences, most_rows] (int64): each sequence's accepted drafts and one token more, then -1.

    `counts` [sequences] (int32) says how many those are; a sequence without rows has 0.
    """

    tokens: Tensor
    counts: Tensor


class Kernels(PagedKernels, RecurrentKernels, ByHeadKernels, Protocol):
    """One device's implementation of every operation that the decoder needs.

    Activations are `activation_dtype`; K and V blocks are `kv_dtype`, laid out
    [blocks, block_size, kv_heads, head_dim].
    """

    name: str
    activation_dtype: torch.dtype
    kv_dtype: torch.dtype
    emulates_quantized_kv: bool  # whether quantized K and V take a time that says nothing about their format
    emulates_kivi: bool  # the same of KIVI's
    chain_verifier: ChainVerifier | None  # None: the host verifies drafts and draws
    batch_invariant: bool  # whether a row's numbers never depend on how many rows share its product
    keeps_mxfp4: bool  # whether `pack` and `linear` have mxfp4
    interleaved: bool  # whether `pack` lays the words of 16 rows side by side

    def describe(self) -> str:
        """One line for the record: which code runs, compiled how."""

    def stalls(self) -> int:
        """How often a thread was missing since the process began because other programs held its core.

        A measurement during which it grew was disturbed; kernels that cannot tell return 0.
        """

    def compilations(self) -> int:
        """How many kernels were made ready in this process when they were first called, which that call waited for."""

    def pack(self, weight: Tensor, format: WeightFormat, group_size: int | None = None) -> PackedWeight:
        """Lays out a [n, k] weight, rounded to nearest; raises ValueError for what these kernels do not have.

        int8, w8a8 and fp8 are symmetric with one scale a row; int4, w4a8, int3 and int2 have a scale and an offset for
        each `group_size` elements of a row (32, or a multiple that divides k; by default the largest up to 128).
        """

    def pack_codes(self, codes: Tensor, scale: Tensor, zero: Tensor | None, format: WeightFormat) -> PackedWeight:
        """Lays out codes that another quantizer chose: the weight is scale * (codes - zero).

        int8 and w8a8 have signed codes and no `zero`; int4, w4a8, int3 and int2 codes from 0 on, about their middle
        where `zero` is None. codes are integers [n, k]; scale and zero [n, k / group_size] or, for a scale a row, [n].
        """

    def pack_fp8(
        self, codes: Tensor, scale: Tensor, *, rounds_inputs: bool, whole_step: bool = False
    ) -> PackedWeight | None:
        """Lays out e4m3 [n, k] with a scale [n] a row, or [ceil(n / 128), ceil(k / 128)] a block of 128 x 128.

        With `rounds_inputs`, `linear` rounds its inputs as well, with a scale a token, or for each 128 of its elements
        where the weight has blocks, or one for the `whole_step`, so that a token's result depends on the others. None
        where these kernels have no product of it.
        """

    def pack_gguf(self, raw: Tensor, type: str, shape: tuple[int, int]) -> PackedWeight:
        """Lays out a GGUF tensor's bytes, in the order of the file, without rounding: Q8_0, Q4_0, Q4_1, Q4_K, Q6_K."""

    def emulates(self, weight: PackedWeight) -> bool:
        """Whether `linear` with a packed weight means what it should but takes a time that says nothing about it.

        It depends on more than the format: on its groups, and on where its numbers come from.
        """

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """x [m, k] times weight [n, k] transposed, accumulated in fp32: [m, n]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension of x [tokens, hidden]."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds x into `residual` in place and returns the norm of the sum, all [tokens, hidden]."""

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """(x - mean(x)) / std(x) * weight + bias over the last dimension, without those that are None.

        With a `residual`, adds x into it in place and norms the sum.
        """

    def norm_heads(self, x: Tensor, first: int, heads: int, weight: Tensor, eps: float) -> None:
        """RMS-norms in place `heads` pieces of each row of x [tokens, width], side by side from column `first` on.

        A piece is as wide as `weight` [head_dim]; with weights of their own, [groups, head_dim], those of piece i are
        `weight[i % groups]`.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up [tokens, 2 * intermediate]: [tokens, intermediate]."""

    def glu(self, gate_up: Tensor, activation: Activation, limit: float | None = None) -> Tensor:
        """activation(gate) * up for gate_up [..., 2 * intermediate]: [..., intermediate].

        With a `limit` gpt-oss's: (up + 1) * gate * sigmoid(1.702 gate) of up within the limit and gate up to it.
        """

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        """activation(x) for each element."""

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Rows [tokens, ...] side by side, each dense by itself."""

    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        """x [tokens, n] plus bias [n]; x may be changed."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y of equal shapes."""

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        """x times a number."""

    def gated(self, x: Tensor, gate: Tensor, *, silu: bool = False) -> Tensor:
        """x [tokens, n] times sigmoid(gate), or silu(gate), for a gate [tokens, n or 1]."""

    def latent_rope_and_store(
        self,
        q: Tensor,
        latents: Tensor,
        norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        batch: RaggedBatch,
        blocks: Tensor,
    ) -> Tensor:
        """What MLA does before it attends, in one pass over the projections.

        The first `rank` elements of `latents` [tokens, rank + rope] are RMS-normed with `norm` [rank] (fp32), the
        others rotated, and both stored at `batch.slots` in `blocks` [blocks, block_size, 1, rank + rope]. Returns q
        [tokens, heads, nope + rope] with the last `rope` elements of each head rotated; it may be changed in place.
        """

    def latent_attention(self, q: Tensor, blocks: Tensor, batch: RaggedBatch, scale: float, rank: int) -> Tensor:
        """Attention of absorbed queries q [tokens, heads, rank + rope] over latents: [tokens, heads, rank].

        A stored vector of `blocks` [blocks, block_size, 1, rank + rope] is every head's key, and its first `rank`
        elements are every head's value. Causal, or as `batch.tree` says.
        """

    def unpacked_attention(
        self, q: Tensor, unpacked: Tensor, keys: Tensor, new: Sequence[int], contexts: Sequence[int], scale: float
    ) -> Tensor:
        """Causal attention of q [tokens, heads, own + shared] over latents that were unpacked: [tokens, heads, value].

        `unpacked` [kept, heads, own + value] has each head's part of a token's key and its value, `keys` [kept, shared]
        what all heads share. Sequence i brings the next `new[i]` tokens, the last of the next `contexts[i]` kept ones.
        """

    def heads_linear(self, x: Tensor, weight: Tensor, tail: int = 0) -> Tensor:
        """Each head of x [tokens, heads, ...] times its own of `weight` [heads, n, k], transposed: [tokens, heads, n].

        A head's first k elements are multiplied. With a `tail` the `tail` elements behind them follow the result:
        [tokens, heads, n + tail].
        """

    def block_copier(self, pools: Sequence[Tensor]) -> BlockCopier:
        """What copies blocks of all `pools` [blocks, ...] at once."""

    def kivi_make_room(self, kv: KiviBlocks, batch: RaggedBatch) -> None:
        """Rounds each sequence's oldest recent tokens, until the new ones of a batch fit beside the others.

        No sequence brings more than `kv.most_new`; they are then stored at `kv.slots(batch)` of the recent.
        """

    def attention_kivi(
        self,
        q: Tensor,
        kv: KiviBlocks,
        batch: RaggedBatch,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """`attention` of a causal batch over codes and the recent, of which its new tokens are the newest."""

    def grouped(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor] | None = None) -> GroupedLinear | None:
        """The linear layers of a mixture's experts as one, with their `biases` [n] each; None where these kernels do
        not multiply such experts together. It holds a copy of the weights, of which its `weights` are parts."""

    def route(
        self, logits: Tensor, top_k: int, rule: RoutingRule, bias: Tensor | None = None, slots: Tensor | None = None
    ) -> Routing:
        """The `top_k` experts of tokens with `logits` [tokens, experts]; of equal scores the lowest number wins.

        `slots` are a batch's [tokens]: where rows may be padding, those of negative slots take no expert.
        """

    def combine(self, slots: Tensor, routing: Routing) -> Tensor:
        """The weighted sum of each token's slots, [slots, n] to [tokens, n]."""

    def count_routed(self, routing: Routing, tokens: Tensor, load: Tensor, probability: Tensor) -> None:
        """Adds to `tokens` [] (int64) how many were routed, to `load` [experts] (int64) each expert's slots, and to
        `probability` [experts] (fp64) the sums of `routing.probabilities`."""
