"""How are K and V kept in 8 or 4 bits, where the kernels read them as they are stored?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from membound.kernels.base import Kernels, RaggedBatch
from membound.kernels.by_head import HeadBlocks
from membound.kernels.kv_formats import KvQuantFormat, QuantizedKv
from membound.roofline.models import GroupedQueryAttention
from membound.runtime.kv.store import PagedKv
from membound.runtime.rope import RopeTables

# The kernels' formats by the name of their precision in roofline: a scale (int4: and a minimum) for each head's vector
# of a token, in 16 bits; fp8 has one scale for all.
KERNEL_FORMATS: dict[str, KvQuantFormat] = {
    "fp8": "fp8",
    "int8_head": "int8",
    "int4_head_zero16": "int4",
}


class KernelQuantizedKv(PagedKv):
    """K and V in a format that the kernels write and attend to without unpacking them first."""

    def __init__(self, kernels: Kernels, kv: QuantizedKv, window: int | None = None) -> None:
        super().__init__(kernels, window)
        self.kv = kv

    @classmethod
    def zeroed(
        cls,
        kernels: Kernels,
        format: KvQuantFormat,
        attention: GroupedQueryAttention,
        num_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> KernelQuantizedKv:
        """A store whose blocks are zero."""
        shape = (num_blocks, block_size, attention.kv_heads, attention.head_dim)
        return cls(kernels, QuantizedKv.zeros(format, *shape, device), attention.window)

    @property
    def emulated(self) -> bool:
        return self.kernels.emulates_quantized_kv

    @property
    def parts(self) -> Sequence[Tensor]:
        """What lies in blocks; the scale of a whole tensor does not."""
        by_block = [self.kv.k, self.kv.v]
        return by_block if self.kv.format == "fp8" else [*by_block, self.kv.scales]

    @property
    def by_token(self) -> Sequence[Tensor]:
        codes = [self.kv.k, self.kv.v]
        return codes if self.kv.format == "fp8" else [*codes, self.kv.scales.transpose(1, 2)]

    def write(self, qkv: Tensor, rope: RopeTables, batch: RaggedBatch) -> Tensor:
        return self.kernels.rope_and_store_quantized(qkv, rope.cos, rope.sin, batch, self.kv)

    def read(self, q: Tensor, batch: RaggedBatch, scale: float, softcap: float | None = None) -> Tensor:
        return self.kernels.attention_quantized(q, self.kv, batch, scale, window=self.window, softcap=softcap)

    def received(self, q: Tensor, batch: RaggedBatch, scale: float, queries: int, softcap: float | None) -> Tensor:
        return self.kernels.attention_scores(q, self.kv, batch, scale, queries=queries, softcap=softcap)

    def by_head(self, heads: int, each: int, apart: int) -> HeadBlocks:
        return HeadBlocks(self.kv.k, self.kv.v, self.kv, heads, each, apart)

    def empty(self, blocks: int, block_size: int, kv_heads: int) -> KernelQuantizedKv:
        device = self.kv.k.device
        kv = QuantizedKv.zeros(self.kv.format, blocks, block_size, kv_heads, self.kv.head_dim, device)
        return KernelQuantizedKv(self.kernels, kv, self.window)
