"""How does a layer attend to the tokens in its KV cache?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from membound.kernels.base import Kernels, RaggedBatch
from membound.roofline.models import GroupedQueryAttention
from membound.runtime.blocks.base import LayerCache
from membound.runtime.kv.store import KvStore
from membound.runtime.linear import Linear
from membound.runtime.rope import RopeTables

NewStore = Callable[[GroupedQueryAttention, int, int, int], KvStore]


@dataclass(frozen=True)
class HeadNorms:
    """The norms of q and k before they are turned: over each head [head_dim], or over all heads at once."""

    q: Tensor
    k: Tensor
    over: str
    eps: float


class GroupedAttention:
    """Attention of `spec`: MHA, GQA or MQA, over a KV store of the kind that `new_store` makes.

    Values narrower than keys are stored as wide as these, with zeros behind them.
    """

    def __init__(
        self,
        spec: GroupedQueryAttention,
        kernels: Kernels,
        rope: RopeTables,
        qkv: Linear,
        o: Linear,
        new_store: NewStore,
        *,
        norms: HeadNorms | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        self.spec = spec
        self.kernels = kernels
        self.rope = rope
        self.qkv = qkv
        self.o = o
        self.norms = norms
        self.softcap = softcap
        self._new_store = new_store
        self._scale = spec.head_dim**-0.5 if scale is None else scale

    def __call__(self, x: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        qkv, gate = self._project(x)
        attended = cache.attend(qkv, self.rope, batch, self._scale, self.softcap)  # type: ignore[attr-defined]
        if self.spec.value_dim < self.spec.head_dim:
            attended = attended.unflatten(1, (self.spec.heads, -1))[..., : self.spec.value_dim].flatten(1)
        if gate is not None:
            attended = self.kernels.gated(attended, gate)
        return self.o(attended)  # [tokens, hidden]

    def new_cache(self, num_blocks: int, block_size: int, seats: int) -> KvStore:
        self.rope.reach(num_blocks * block_size)
        return self._new_store(self.spec, num_blocks, block_size, seats)

    def storing(self, new_store: NewStore) -> GroupedAttention:
        """The same attention over a KV store of another kind."""
        other = copy(self)
        other._new_store = new_store
        return other

    def linears(self) -> Iterator[tuple[str, Linear]]:
        yield "qkv", self.qkv
        yield "o", self.o

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """q, k and v [tokens, (heads + 2 * kv_heads) * head_dim], and the output's gate [tokens, heads * v_dim]."""
        spec, qkv = self.spec, self.qkv(x)
        widths = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.value_dim]
        gate_width = spec.heads * spec.value_dim if spec.output_gate else 0
        if self.norms is not None:
            self._norm(qkv, 0, spec.heads, self.norms.q)
            self._norm(qkv, widths[0] + gate_width, spec.kv_heads, self.norms.k)
        gate: Tensor | None = None
        if not spec.output_gate and spec.value_dim == spec.head_dim:
            return qkv, gate
        q, found, k, v = qkv.split([widths[0], gate_width, *widths[1:]], dim=-1)
        if spec.output_gate:
            gate = found
        if spec.value_dim < spec.head_dim:
            v = functional.pad(v.unflatten(1, (spec.kv_heads, -1)), (0, spec.head_dim - spec.value_dim)).flatten(1)
        return self.kernels.joined([q, k, v]), gate

    def _norm(self, qkv: Tensor, first: int, heads: int, weight: Tensor) -> None:
        """Norms heads of qkv in place, each by itself or all at once."""
        assert self.norms is not None, "the caller has checked it"
        pieces = heads if self.norms.over == "head" else 1
        self.kernels.norm_heads(qkv, first, pieces, weight, self.norms.eps)
