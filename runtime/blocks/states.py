"""What does a recurrent layer keep for each sequence, and in which pieces does it take a ragged batch?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch


class SeatStates:
    """Tensors [seats, ...] by name: the state of the sequence that has each seat, zero for one that begins."""

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

    def begin(self, batch: RaggedBatch) -> None:
        """Clears the seats of sequences whose first new token is their first of all."""
        seats = seats_of(batch)
        first = batch.positions[batch.query_start[:-1].long()] == 0  # [sequences]
        for part in self.parts.values():
            kept = part[seats]
            part[seats] = torch.where(first.view(-1, *[1] * (kept.dim() - 1)), 0, kept)


@dataclass(frozen=True)
class Segment:
    """Sequences that bring equally many tokens: `rows` [sequences, tokens] of the batch, `seats` [sequences]."""

    rows: Tensor
    seats: Tensor


def seats_of(batch: RaggedBatch) -> Tensor:
    """The seat of each sequence; in their order where the batch names none."""
    if batch.seats is not None:
        return batch.seats
    return torch.arange(batch.num_sequences, device=batch.positions.device)


def segments(batch: RaggedBatch) -> Iterator[Segment]:
    """A batch in pieces: all sequences of as many tokens at once."""
    seats = seats_of(batch)
    if batch.most_queries == 1:
        yield Segment(torch.arange(batch.num_tokens, device=seats.device)[:, None], seats)
        return
    starts = batch.query_start.tolist()
    by_length: dict[int, list[int]] = {}
    for i in range(batch.num_sequences):
        by_length.setdefault(starts[i + 1] - starts[i], []).append(i)
    for length, sequences in by_length.items():
        if length:
            first = torch.tensor([starts[i] for i in sequences], device=seats.device)
            yield Segment(first[:, None] + torch.arange(length, device=seats.device), seats[sequences])


def short_convolution(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """A causal convolution of each channel over x [sequences, tokens, channels], and the state after it.

    `state` [sequences, width - 1, channels] are the inputs before x, `weight` is [channels, width]; fp32.
    """
    tokens, width = x.shape[1], weight.shape[1]
    whole = torch.cat([state, x], dim=1)
    y = sum(whole[:, i : i + tokens] * weight[:, i] for i in range(width))
    assert isinstance(y, Tensor)
    return y if bias is None else y + bias, whole[:, tokens:]
