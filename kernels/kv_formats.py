"""How do quantized keys and values lie in the paged cache, and what numbers do they stand for?

The layout is that of the Triton kernels' `KvBlocks`, so one cache serves the CPU and a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KvQuantFormat = Literal["fp8", "int8", "int4"]
KV_DTYPES: dict[KvQuantFormat, torch.dtype] = {"fp8": torch.uint8, "int8": torch.int8, "int4": torch.uint8}
# fp16 numbers that a token has for each head: int8's scales of k and v; int4's scale and minimum of k and of v
PER_TOKEN: dict[KvQuantFormat, int] = {"fp8": 0, "int8": 2, "int4": 4}
LARGEST_E4M3 = 448.0


@dataclass(frozen=True, eq=False)
class QuantizedKv:
    """One layer's paged K and V in fewer bits than 16; `k` and `v` are [blocks, block_size, kv_heads, stored].

    fp8 is e4m3 in uint8, times `scales` [2, kv_heads] (fp32, of k and of v). int8 and int4 have `scales`
    [blocks, kv_heads, block_size, 2 or 4] (fp16) a token: int8 is code * scale, of k and then of v; int4 is
    code * scale + minimum with codes from 0 to 15, of k and then of v. int4's `stored` is head_dim / 2 bytes, of which
    byte i holds element i (low bits) and i + head_dim / 2 (high bits).
    """

    format: KvQuantFormat
    k: Tensor
    v: Tensor
    scales: Tensor

    @classmethod
    def zeros(
        cls,
        format: KvQuantFormat,
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | str = "cpu",
    ) -> QuantizedKv:
        """Blocks that nobody has written; fp8's scales are 1, which suits keys and values of models up to 448."""
        if format not in KV_DTYPES:
            raise ValueError(f"format: is {format}, should be one of {', '.join(KV_DTYPES)}")
        if head_dim % 2:
            raise ValueError(f"head_dim: is {head_dim}, should be even")
        shape = (blocks, block_size, kv_heads, head_dim // 2 if format == "int4" else head_dim)
        k, v = (torch.zeros(shape, dtype=KV_DTYPES[format], device=device) for _ in range(2))
        if format == "fp8":
            return cls(format, k, v, torch.ones(2, kv_heads, device=device))
        shape = (blocks, kv_heads, block_size, PER_TOKEN[format])
        return cls(format, k, v, torch.zeros(shape, dtype=torch.float16, device=device))

    @property
    def block_size(self) -> int:
        return self.k.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3] * (2 if self.format == "int4" else 1)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes + self.scales.nbytes

    def store(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Quantizes k and v [tokens, kv_heads, head_dim] into their slots [tokens]: what fused kernels do in C++."""
        block, offset = slots // self.block_size, slots % self.block_size
        for part, (codes, x) in enumerate(((self.k, k.float()), (self.v, v.float()))):
            if self.format == "fp8":
                scaled = (x / self.scales[part][:, None]).clamp(-LARGEST_E4M3, LARGEST_E4M3)
                codes[block, offset] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
                continue
            if self.format == "int8":
                scale = (x.abs().amax(-1) / 127).half()
                self.scales[block, :, offset, part] = scale
                codes[block, offset] = _codes(x, scale, -127, 127).to(torch.int8)
                continue
            minimum = x.amin(-1).half()
            scale = ((x.amax(-1) - minimum.float()).clamp_min(0) / 15).half()
            self.scales[block, :, offset, 2 * part : 2 * part + 2] = torch.stack([scale, minimum], dim=-1)
            low, high = _codes(x - minimum.float()[..., None], scale, 0, 15).to(torch.uint8).chunk(2, dim=-1)
            codes[block, offset] = low | high << 4

    def dequantized(self) -> tuple[Tensor, Tensor]:
        """K and V in fp32, [blocks, block_size, kv_heads, head_dim]: what the stored numbers mean."""
        if self.format == "fp8":
            k, v = (t.view(torch.float8_e4m3fn).float() for t in (self.k, self.v))
            return k * self.scales[0, :, None], v * self.scales[1, :, None]
        meta = self.scales.float().permute(3, 0, 2, 1).unsqueeze(-1)  # [2 or 4, blocks, block_size, kv_heads, 1]
        if self.format == "int8":
            return self.k.float() * meta[0], self.v.float() * meta[1]
        k, v = (torch.cat([t & 0xF, t >> 4], dim=-1).float() for t in (self.k, self.v))
        return k * meta[0] + meta[1], v * meta[2] + meta[3]


def _codes(x: Tensor, scale: Tensor, lowest: int, highest: int) -> Tensor:
    divisor = torch.where(scale > 0, scale.float(), 1.0)[..., None]
    return (x / divisor).round_().clamp_(lowest, highest)
