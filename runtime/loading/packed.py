"""What numbers do matrices stand for that a safetensors file keeps in fp8 or MXFP4?"""

from __future__ import annotations

import torch
from torch import Tensor

# e2m1, by its four bits (OCP Microscaling Formats 1.0, section 5.3.3)
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_E8M0_BIAS = 127


def from_fp8(values: Tensor, scale: Tensor) -> Tensor:
    """values [n, k] times a scale of all, [n, 1] of each row, or of each block, of which the last may be smaller."""
    numbers = values.float()
    if scale.numel() == 1:
        return numbers * scale.float().reshape(())
    scale = scale.float().reshape(-1, 1) if scale.dim() == 1 else scale.float()
    block = [-(-size // parts) for size, parts in zip(values.shape, scale.shape, strict=True)]
    block = [
        1 << (size - 1).bit_length() if parts > 1 else size for size, parts in zip(block, scale.shape, strict=True)
    ]
    spread = scale.repeat_interleave(block[0], 0)[: values.shape[0]].repeat_interleave(block[1], 1)
    return numbers * spread[:, : values.shape[1]]


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[experts, k, n] of gpt-oss: blocks [experts, n, k / 32, 16] of two numbers a byte, low bits first.

    `scales` [experts, n, k / 32] are exponents of two.
    """
    low, high = _FP4[(blocks & 15).long()], _FP4[(blocks >> 4).long()]
    numbers = torch.stack([low, high], dim=-1).flatten(-2)  # [experts, n, k / 32, 32]
    return torch.ldexp(numbers, scales[..., None].int() - _E8M0_BIAS).flatten(-2).transpose(1, 2)
