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
# numbers of metadata that each token has for each head: int8's scale, int4's scale and minimum
PER_TOKEN: dict[KvFormat, int] = {"bf16": 0, "fp16": 0, "fp8": 0, "int8": 1, "int4": 2}
SCALE_DTYPE = torch.float16


@dataclass(frozen=True)
class KvBlocks:
    """One layer's paged K and V.

    `k` and `v` are [blocks, block_size, kv_heads, head_dim], dense within a block. fp8 is e4m3 in uint8, times
    `k_scale[kv_heads]` (fp32, calibrated). int8 and int4 have metadata a token and head, `k_scale`
    [blocks, kv_heads, 1 or 2, block_size] in fp16: int8 is q * scale; int4 is q * scale + minimum with q from 0 to 15,
    its last dimension head_dim / 2 bytes, of which byte i holds element i (low bits) and i + head_dim / 2 (high bits).
    """

    format: KvFormat
    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

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
            return cls(format, k, v, *(torch.ones(kv_heads, device=device) for _ in range(2)))
        if PER_TOKEN[format] == 0:
            return cls(format, k, v)
        meta = (blocks, kv_heads, PER_TOKEN[format], block_size)
        return cls(format, k, v, *(torch.zeros(meta, dtype=SCALE_DTYPE, device=device) for _ in range(2)))

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
        meta = PER_TOKEN[self.format]
        for name, value, stored in (("kv.k_scale", self.k_scale, self.k), ("kv.v_scale", self.v_scale, self.v)):
            if self.format != "fp8" and meta == 0:
                check.require(value is None, name, f"{self.format} has no scales")
                continue
            if value is None:
                raise ValueError(f"{name}: is missing, {self.format} needs it")
            if self.format == "fp8":
                check.tensor(name, value, [self.kv_heads], [torch.float32], like)
            else:
                shape = [stored.shape[0], self.kv_heads, meta, self.block_size]
                check.strided(name, value, shape, [SCALE_DTYPE], like)

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        """K, V and their scales for a kernel, which does not look at the scales that a format lacks."""
        return (
            self.k,
            self.v,
            self.k if self.k_scale is None else self.k_scale,
            self.v if self.v_scale is None else self.v_scale,
        )

    @property
    def strides(self) -> tuple[int, ...]:
        """From one block to the next in each of `pointers`, in elements."""
        return tuple(pointer.stride(0) for pointer in self.pointers)

    def constants(self, machine: Machine) -> dict[str, Any]:
        """What is compiled into a kernel that reads these blocks on `machine`."""
        half = self.head_dim // 2
        return dict(
            KV_HEADS=self.kv_heads,
            HALF=half,
            BLOCK_HALF=max(16, triton.next_power_of_2(half)),
            META=PER_TOKEN[self.format],
            BLOCK_SIZE=self.block_size,
            FORMAT=self.format,
            FP8_NATIVE=machine.has_fp8,
        )

    def dequantized(self) -> tuple[Tensor, Tensor]:
        """K and V in fp32, [blocks, block_size, kv_heads, head_dim]: what the stored numbers mean."""
        return self._dequantized(self.k, self.k_scale), self._dequantized(self.v, self.v_scale)

    def _dequantized(self, stored: Tensor, scale: Tensor | None) -> Tensor:
        if scale is None:
            return stored.float()
        if self.format == "fp8":
            return stored.view(torch.float8_e4m3fn).float() * scale[:, None]
        meta = scale.float().permute(2, 0, 3, 1).unsqueeze(-1)  # [1 or 2, blocks, block_size, kv_heads, 1]
        if self.format == "int8":
            return stored.float() * meta[0]
        return torch.cat([stored & 0xF, stored >> 4], dim=-1).float() * meta[0] + meta[1]

    def token_bytes(self) -> int:
        """Bytes of K and V, with metadata, that one token holds in this layer."""
        row = self.k.shape[3] * self.k.itemsize + PER_TOKEN[self.format] * SCALE_DTYPE.itemsize
        return 2 * self.kv_heads * row
