"""What do blocks of several tensors hold, as bytes?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def content_of(parts: Sequence[Tensor], blocks: Sequence[int]) -> Tensor:
    """A copy of the blocks of all `parts` [blocks, ...], as bytes [blocks, bytes_per_block]."""
    rows = torch.as_tensor(blocks, device=parts[0].device)
    return torch.cat([part[rows].flatten(1).view(torch.uint8) for part in parts], dim=1)


def put_content(parts: Sequence[Tensor], blocks: Sequence[int], content: Tensor) -> None:
    """Puts what `content_of` equal parts returned into these blocks."""
    rows = torch.as_tensor(blocks, device=parts[0].device)
    widths = [part[0].numel() * part.itemsize for part in parts]
    for part, piece in zip(parts, content.to(parts[0].device).split(widths, dim=1), strict=True):
        part[rows] = piece.contiguous().view(part.dtype).view(len(blocks), *part.shape[1:])
