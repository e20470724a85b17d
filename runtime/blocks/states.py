"""What does a recurrent layer keep for each sequence?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class SeatStates:
    """Tensors [seats, ...] by name: the state of the sequence that has each seat, whatever it is before it begins."""

    def __init__(self, parts: Mapping[str, Tensor]) -> None:
        self.parts = dict(parts)

    @classmethod
    def zeroed(cls, seats: int, device: torch.device, **shapes: tuple[int, ...]) -> SeatStates:
        """fp32 states of these shapes a seat."""
        return cls({name: torch.zeros(seats, *shape, device=device) for name, shape in shapes.items()})

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def read_seats(self, seats: Sequence[int]) -> Tensor:
        """A copy of what is kept for these seats, as bytes [seats, bytes_per_seat]."""
        rows = torch.as_tensor(seats, device=next(iter(self.parts.values())).device)
        return torch.cat([part[rows].flatten(1).view(torch.uint8) for part in self.parts.values()], dim=1)

    def write_seats(self, seats: Sequence[int], content: Tensor) -> None:
        """Puts what `read_seats` of equal states returned into these seats."""
        device = next(iter(self.parts.values())).device
        rows = torch.as_tensor(seats, device=device)
        widths = [part[0].numel() * part.itemsize for part in self.parts.values()]
        for part, piece in zip(self.parts.values(), content.to(device).split(widths, dim=1), strict=True):
            part[rows] = piece.contiguous().view(part.dtype).view(len(seats), *part.shape[1:])
