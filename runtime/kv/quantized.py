"""How are K and V kept in 8 or 4 bits, where the kernels read them as they are stored?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from membound.kernels.base import Kernels, RaggedBatch
from membound.kernels.kv_formats import KvQuantFormat, QuantizedKv
from membound.roofline.models import GroupedQueryAttention
from membound.runtime.kv.content import content_of, put_content
from membound.runtime.kv.store import move_slots
from membound.runtime.rope import RopeTables

# The kernels' formats by the name of their precision in roofline: a scale (int4: and a minimum) for each head's vector
# of a token, in 16 bits; fp8 has one scale for all.
KERNEL_FORMATS: dict[str, KvQuantFormat] = {
    "fp8": "fp8",
    "int8_head": "int8",
    "int4_head_zero16": "int4",
}


class KernelQuantizedKv:
    """K and V in a format that the kernels write and attend to without unpacking them first."""

    emulated = False

    def __init__(self, kernels: Kernels, kv: QuantizedKv, window: int | None = None) -> None:
        self.kernels = kernels
        self.kv = kv
        self.window = window

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
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def attend(
        self, qkv: Tensor, rope: RopeTables, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        q = self.kernels.rope_and_store_quantized(qkv, rope.cos, rope.sin, batch, self.kv)
        return self.kernels.attention_quantized(q, self.kv, batch, scale, window=self.window, softcap=softcap)

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        return content_of(self.parts, blocks)

    def write_blocks(self, blocks: Sequence[int], content: Tensor) -> None:
        put_content(self.parts, blocks, content)

    def move_tokens(self, sources: Tensor, targets: Tensor) -> None:
        by_token = [self.kv.k, self.kv.v]
        if self.kv.format != "fp8":
            by_token.append(self.kv.scales.transpose(1, 2))
        move_slots(by_token, sources, targets)

    @property
    def parts(self) -> list[Tensor]:
        """What lies in blocks; the scale of a whole tensor does not."""
        by_block = [self.kv.k, self.kv.v]
        return by_block if self.kv.format == "fp8" else [*by_block, self.kv.scales]
