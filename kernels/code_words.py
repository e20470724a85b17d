"""How do the codes of a row lie in 32-bit words, and how are words of 16 rows laid side by side?

A row of int8, int4, int3, int2 and the k-quants is a run of 32-bit words. The order of the codes in a word is that of
GGUF's Q4_0: of 32 int4 codes, byte i holds code i in its low bits and code i + 16 in its high bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from membound.kernels.base import WeightFormat

CODE_BITS: dict[WeightFormat, int] = {"int8": 8, "w8a8": 8, "int4": 4, "w4a8": 4, "int3": 3, "int2": 2}
TILE_ROWS = 16


def interleave(rows: Tensor) -> Tensor:
    """[n, words] to [ceil(n / 16), words, 16], zeros for the rows that are not there."""
    padded = pad(rows, (0, 0, 0, -rows.shape[0] % TILE_ROWS))
    return padded.view(-1, TILE_ROWS, rows.shape[1]).transpose(1, 2).contiguous()


def deinterleave(tiles: Tensor, n: int) -> Tensor:
    return with_usual_strides(tiles.transpose(1, 2).reshape(-1, tiles.shape[1])[:n])


def with_usual_strides(x: Tensor) -> Tensor:
    """A copy with the usual strides, also of dimensions of one, which a view as another type looks at."""
    return x.clone(memory_format=torch.contiguous_format)


def _bytes(codes: Tensor) -> Tensor:
    return codes.to(torch.int8).view(torch.uint8)


def _nibbles(codes: Tensor) -> Tensor:
    """Of 32 codes, byte i: code i (low) and i + 16 (high)."""
    low, high = codes.to(torch.uint8).unflatten(1, (-1, 2, 16)).unbind(2)  # [n, k / 32, 16]
    return (low | high << 4).flatten(1)


def _crumbs(codes: Tensor) -> Tensor:
    """Of 32 codes, bits 2c of byte i: code i + 8c."""
    parts = (codes.to(torch.uint8) & 3).unflatten(1, (-1, 4, 8)).unbind(2)  # 4 of [n, k / 32, 8]
    return (parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6).flatten(1)


def _three_bits(codes: Tensor) -> Tensor:
    """Of 32 codes, 8 bytes of their low two bits as int2, then a word of their third bits.

    Code 8c + 4j + b has its third bit at 4c + 2j + (b & 1), plus 16 for b of 2 and 3.
    """
    n = codes.shape[0]
    third = (codes.to(torch.int64) >> 2).view(n, -1, 32)
    words = (third << _third_places(codes.device)).sum(dim=-1)  # [n, k / 32]
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return torch.cat([_crumbs(codes).view(n, -1, 8), words[:, :, None].view(torch.uint8)], dim=-1).flatten(1)


def _third_places(device: torch.device) -> Tensor:
    code = torch.arange(32, device=device)
    c, j, b = code // 8, code // 4 % 2, code % 4
    return 4 * c + 2 * j + b % 2 + b // 2 * 16


def _from_nibbles(rows: Tensor) -> Tensor:
    blocks = rows.reshape(rows.shape[0], -1, 16)
    return torch.cat([blocks & 15, blocks >> 4], dim=-1).flatten(1)


def _from_crumbs(rows: Tensor) -> Tensor:
    blocks = rows.reshape(rows.shape[0], -1, 8)
    return torch.cat([blocks >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(1)


def _from_three_bits(rows: Tensor) -> Tensor:
    blocks = rows.reshape(rows.shape[0], -1, 12)
    words = with_usual_strides(blocks[:, :, 8:]).view(torch.int32)  # [n, k / 32, 1]
    third = words >> _third_places(rows.device) & 1
    low = _from_crumbs(blocks[:, :, :8].flatten(1)).view(third.shape)
    return (low | third << 2).flatten(1)


# Bytes of a row's codes, and codes of a row's bytes.
LAYOUT: dict[WeightFormat, Callable[[Tensor], Tensor]] = {
    "int8": _bytes,
    "w8a8": _bytes,
    "int4": _nibbles,
    "w4a8": _nibbles,
    "int3": _three_bits,
    "int2": _crumbs,
}
CODES: dict[WeightFormat, Callable[[Tensor], Tensor]] = {
    "int8": lambda rows: rows.view(torch.int8),
    "w8a8": lambda rows: rows.view(torch.int8),
    "int4": _from_nibbles,
    "w4a8": _from_nibbles,
    "int3": _from_three_bits,
    "int2": _from_crumbs,
}
