"""How do cached keys and values lie in memory, in each of the formats that attention reads?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from membound.kernels.triton import check
from membound.kernels.triton.machine import Machine

KvFormat = Literal["bf16", "fp16", "fp8", "int8", "int4"]
STORED: dict[KvFormat, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,
    "int8": torch.int8,
    "int4": torch.uint8,
}
BITS: dict[KvFormat, int] = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}
# halves of metadata that a token has for each head: int8's scales of k and v; int4's scale and minimum of k and of v
PER_TOKEN: dict[KvFormat, int] = {"bf16": 0, "fp16": 0, "fp8": 0, "int8": 2, "int4": 4}
SCALE_DTYPE = torch.float16
# As the kernels load it: all of a token's metadata at once, since asynchronous copies take 4 bytes at least.
WORDS: dict[KvFormat, torch.dtype] = {"int8": torch.int32, "int4": torch.int64}


@dataclass(frozen=True)
class KvBlocks:
    """One layer's paged K and V.

    `k` and `v` are [blocks, block_size, kv_heads, head_dim], dense within a block. fp8 is e4m3 in uint8, times
    `scales` [2, kv_heads] (fp32, calibrated). int8 and int4 have `scales` [blocks, kv_heads, block_size, 2 or 4] (fp16)
    a token: int8 is q * scale, of k and then of v; int4 is q * scale + minimum with q from 0 to 15, of k and then of v.
    int4's last dimension is head_dim / 2 bytes, of which byte i holds element i (low bits) and i + head_dim / 2 (high).
    """

    format: KvFormat
    k: Tensor
    v: Tensor
    scales: Tensor | None = None

    @classmethod
    def zeros(
        cls,
        format: KvFormat,
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | str,
    ) -> KvBlocks:
        """Blocks that nobody has written; fp8's scales are 1."""
        stored = head_dim // 2 if format == "int4" else head_dim
        shape = (blocks, block_size, kv_heads, stored)
        k, v = (torch.zeros(shape, dtype=STORED[format], device=device) for _ in range(2))
        if format == "fp8":
            return cls(format, k, v, torch.ones(2, kv_heads, device=device))
        if PER_TOKEN[format] == 0:
            return cls(format, k, v)
        shape = (blocks, kv_heads, block_size, PER_TOKEN[format])
        return cls(format, k, v, torch.zeros(shape, dtype=SCALE_DTYPE, device=device))

    @property
    def block_size(self) -> int:
        return self.k.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3] * (2 if self.format == "int4" else 1)

    def check(self, head_dim: int, like: Tensor) -> None:
        """Raises ValueError, which names the argument, unless a kernel can read these blocks safely."""
        check.require(self.format in STORED, "kv.format", f"is {self.format}, should be one of {', '.join(STORED)}")
        check.require(
            self.head_dim == head_dim and head_dim % 2 == 0,
            "kv.k",
            f"head_dim is {self.head_dim}, should be even and equal q's {head_dim}",
        )
        for name, blocks in (("kv.k", self.k), ("kv.v", self.v)):
            check.strided(name, blocks, self.k.shape, [STORED[self.format]], like)
        if self.format != "fp8" and PER_TOKEN[self.format] == 0:
            check.require(self.scales is None, "kv.scales", f"{self.format} has none")
        elif self.scales is None:
            raise ValueError(f"kv.scales: are missing, {self.format} needs them")
        elif self.format == "fp8":
            check.tensor("kv.scales", self.scales, [2, self.kv_heads], [torch.float32], like)
        else:
            shape = [self.k.shape[0], self.kv_heads, self.block_size, PER_TOKEN[self.format]]
            check.tensor("kv.scales", self.scales, shape, [SCALE_DTYPE], like)

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """K, V and what attention reads of their scales, at which it does not look if a format has none."""
        if self.scales is None:
            return self.k, self.v, self.k
        words = WORDS.get(self.format)
        return self.k, self.v, self.scales if words is None else self.scales.view(words)

    @property
    def strides(self) -> tuple[int, int]:
        """From one block to the next in K and in V, in elements."""
        return self.k.stride(0), self.v.stride(0)

    def constants(self, machine: Machine) -> dict[str, Any]:
        """What is compiled into a kernel that reads these blocks on `machine`."""
        half = self.head_dim // 2
        return dict(
            KV_HEADS=self.kv_heads,
            HALF=half,
            BLOCK_HALF=max(16, triton.next_power_of_2(half)),
            BLOCK_SIZE=self.block_size,
            FORMAT=self.format,
            WIDEN=machine.widening,
        )

    def dequantized(self) -> tuple[Tensor, Tensor]:
        """K and V in fp32, [blocks, block_size, kv_heads, head_dim]: what the stored numbers mean."""
        if self.scales is None:
            return self.k.float(), self.v.float()
        if self.format == "fp8":
            k, v = (t.view(torch.float8_e4m3fn).float() for t in (self.k, self.v))
            return k * self.scales[0, :, None], v * self.scales[1, :, None]
        meta = self.scales.float().permute(3, 0, 2, 1).unsqueeze(-1)  # [2 or 4, blocks, block_size, kv_heads, 1]
        if self.format == "int8":
            return self.k.float() * meta[0], self.v.float() * meta[1]
        k, v = (torch.cat([t & 0xF, t >> 4], dim=-1).float() for t in (self.k, self.v))
        return k * meta[0] + meta[1], v * meta[2] + meta[3]

    def token_bytes(self) -> int:
        """Bytes of K and V, with metadata, that one token holds in this layer."""
        vectors = 2 * self.k.shape[3] * self.k.itemsize
        return self.kv_heads * (vectors + PER_TOKEN[self.format] * SCALE_DTYPE.itemsize)
