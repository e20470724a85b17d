"""How does a layer attend to the tokens in its KV cache?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy

import torch
from torch import Tensor

from membound.kernels.base import Kernels, RaggedBatch
from membound.roofline.models import GroupedQueryAttention
from membound.runtime.blocks.base import LayerCache
from membound.runtime.kv_store import KvStore
from membound.runtime.linear import Linear
from membound.runtime.rope import RopeTables

NewStore = Callable[[GroupedQueryAttention, int, int, int], KvStore]


class GroupedAttention:
    """Attention of `spec`: MHA, GQA or MQA, over a KV store of the kind that `new_store` makes.

    Before rotation some models add a bias to q, k and v (Qwen2), or norm each head of q and k (Qwen3).
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
        bias: Tensor | None = None,
        norms: tuple[Tensor, Tensor] | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        self.spec = spec
        self.kernels = kernels
        self.rope = rope
        self.qkv = qkv
        self.o = o
        self.bias = None if bias is None else bias.to(kernels.activation_dtype)
        self.norms = norms
        self.norm_eps = norm_eps
        self._new_store = new_store
        self._scale = spec.head_dim**-0.5

    def __call__(self, x: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        qkv = self._project(x)  # [tokens, (heads + 2 * kv_heads) * head_dim]
        attended = cache.attend(qkv, self.rope, batch, self._scale)  # type: ignore[attr-defined]
        return self.o(attended)  # [tokens, hidden]

    def new_cache(self, num_blocks: int, block_size: int, seats: int) -> KvStore:
        return self._new_store(self.spec, num_blocks, block_size, seats)

    def storing(self, new_store: NewStore) -> GroupedAttention:
        """The same attention over a KV store of another kind."""
        other = copy(self)
        other._new_store = new_store
        return other

    def linears(self) -> Iterator[tuple[str, Linear]]:
        yield "qkv", self.qkv
        yield "o", self.o

    def _project(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        if self.bias is not None:
            qkv = qkv + self.bias
        if self.norms is not None:
            spec, tokens = self.spec, qkv.shape[0]
            widths = [spec.heads * spec.head_dim, *2 * (spec.kv_heads * spec.head_dim,)]
            *normed, v = qkv.split(widths, dim=-1)
            heads = [part.reshape(-1, spec.head_dim) for part in normed]
            q, k = (
                self.kernels.rms_norm(part, norm, self.norm_eps) for part, norm in zip(heads, self.norms, strict=True)
            )
            qkv = torch.cat([q.view(tokens, -1), k.view(tokens, -1), v], dim=-1)
        return qkv
