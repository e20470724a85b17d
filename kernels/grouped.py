"""How are numbers rounded to a few bits with a scale and a minimum for each group of them, and packed into bytes?"""

from __future__ import annotations

import torch
from torch import Tensor

META = torch.float16  # of a scale and of a minimum: the 32 bits a group that roofline counts


def encode(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Rounds each group x [..., group] to the nearest of 2^bits levels between its least and its largest.

    Returns codes [..., group] (uint8) and meta [..., 2]: scale and minimum, of which code * scale + minimum is made.
    Source: the asymmetric quantization of KIVI (Liu et al., ICML 2024, section 3.1).
    """
    x = x.float()
    low = x.amin(-1, keepdim=True).to(META)
    scale = ((x.amax(-1, keepdim=True) - low.float()).clamp_min(0) / (2**bits - 1)).to(META)
    steps = torch.where(scale > 0, scale.float(), 1.0)
    codes = ((x - low.float()) / steps).round().clamp(0, 2**bits - 1).to(torch.uint8)
    return codes, torch.cat([scale, low], dim=-1)


def decode(codes: Tensor, meta: Tensor) -> Tensor:
    """The numbers [..., group] in fp32 that codes [..., group] with meta [..., 2] stand for."""
    scale, low = meta.float().split(1, dim=-1)
    return codes.float().mul_(scale).add_(low)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n] in n * bits / 8 bytes: of byte i the lowest bits hold code i."""
    packed, *others = codes.chunk(8 // bits, dim=-1)
    for lane, part in enumerate(others, start=1):
        packed = packed | part << (bits * lane)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The codes [..., n] that `pack` put into bytes."""
    return torch.cat([packed >> shift & (2**bits - 1) for shift in range(0, 8, bits)], dim=-1)
