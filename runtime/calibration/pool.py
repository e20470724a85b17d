"""Where do a micro-benchmark's weights and cached keys lie, so that they come from memory?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from membound.kernels.arena import ALIGNMENT_BYTES, Arena
from membound.kernels.base import Kernels, PackedWeight, WeightFormat

# As many rows as the layouts of the C++ kernels and of the Triton kernels keep together.
INTERLEAVED_ROWS, TILE_ROWS = 16, 64
# Every byte alike, so that the same memory reads as 0.0115 in fp32 and bf16, as 1.06 in fp16, as 60 in int8, as codes 3
# and 12 in int4, and as two kept of every four in 2:4.
_BYTE = 0x3C


class Pool:
    """One large buffer whose parts are handed out in turn, so that a part was last read a whole round ago."""

    def __init__(self, buffer: Tensor) -> None:
        self.bytes = buffer
        self._next = 0

    @classmethod
    def of(cls, size_bytes: int, device: str) -> Pool:
        """A new buffer on a device."""
        if device.startswith("cpu"):
            return cls(Arena().empty((size_bytes,), torch.uint8).fill_(_BYTE))
        return cls(torch.full((size_bytes,), _BYTE, dtype=torch.uint8, device=device))

    def first(self, size_bytes: int) -> Pool:
        """A pool over the first bytes of this one, whose rounds are shorter."""
        return Pool(self.bytes[:size_bytes])

    @property
    def size_bytes(self) -> int:
        return self.bytes.numel()

    def parts(self, size_bytes: int, count: int, within_bytes: int | None = None) -> list[Tensor]:
        """`count` parts of `size_bytes`; with `within_bytes` they repeat within that much memory, to stay cached."""
        step = -(-size_bytes // 4096) * 4096
        limit = self.size_bytes if within_bytes is None else max(within_bytes, step)
        start = 0 if within_bytes is not None else self._next
        taken = []
        for _ in range(count):
            if start + size_bytes > limit:
                start = 0
            taken.append(self.bytes[start : start + size_bytes])
            start += step
        if within_bytes is None:
            self._next = start
        return taken

    def weights(
        self,
        kernels: Kernels,
        format: WeightFormat,
        n: int,
        k: int,
        count: int,
        within_bytes: int | None = None,
    ) -> list[PackedWeight]:
        """`count` weights [n, k] in the layout in which `kernels` packs them; what they hold means nothing."""
        layout = PackedLayout.of(kernels, format, n, k)
        return [layout.over(part) for part in self.parts(layout.nbytes, count, within_bytes)]

    def blocks(self, shape: Sequence[int], dtype: torch.dtype, count: int) -> list[Tensor]:
        """`count` tensors of a shape and type."""
        elements = torch.Size(shape).numel()
        return [part.view(dtype).view(*shape) for part in self.parts(elements * dtype.itemsize, count)]


@dataclass(frozen=True)
class PackedLayout:
    """The tensors of a packed weight [n, k], without memory: what `like` has for a few rows, for all of them."""

    like: PackedWeight
    shapes: dict[str, tuple[int, ...]]
    size: tuple[int, int]

    @classmethod
    def of(cls, kernels: Kernels, format: WeightFormat, n: int, k: int) -> PackedLayout:
        """Read off packed weights of as many rows as lie together, and of twice as many.

        Raises ValueError as `kernels.pack` does.
        """
        device = getattr(kernels, "device", "cpu")
        like, twice = (kernels.pack(torch.zeros(rows, k, device=device), format) for rows in (TILE_ROWS, 2 * TILE_ROWS))
        shapes = {}
        for name in ("data", "scale", "offset", "kept"):
            if (tensor := getattr(like, name)) is not None:
                sizes = zip(tensor.shape, getattr(twice, name).shape, strict=True)
                shapes[name] = tuple(_grown(one, two, n, like.interleaved) for one, two in sizes)
        return cls(like, shapes, (n, k))

    @classmethod
    def fits(cls, kernels: Kernels, format: WeightFormat, k: int) -> bool:
        """Whether these kernels pack the format, and each further tile of rows as the first."""
        rows, device = 3 * TILE_ROWS, getattr(kernels, "device", "cpu")
        try:
            layout = cls.of(kernels, format, rows, k)
            packed = kernels.pack(torch.zeros(rows, k, device=device), format)
        except ValueError:
            return False
        return all(tuple(getattr(packed, name).shape) == shape for name, shape in layout.shapes.items())

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, each at a multiple of the alignment."""
        return sum(_aligned(self._nbytes(name)) for name in self.shapes)

    def over(self, memory: Tensor) -> PackedWeight:
        """The packed weight whose tensors lie in `memory`, one behind the other."""
        tensors: dict[str, Any] = {}
        start = 0
        for name, shape in self.shapes.items():
            size = self._nbytes(name)
            tensors[name] = memory[start : start + size].view(getattr(self.like, name).dtype).view(shape)
            start += _aligned(size)
        return replace(self.like, **tensors, size=None if self.like.size is None else self.size)

    def _nbytes(self, name: str) -> int:
        return math.prod(self.shapes[name]) * getattr(self.like, name).dtype.itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _grown(one: int, two: int, n: int, interleaved: bool) -> int:
    """A dimension's size for n rows, that has size `one` for a tile of them and `two` for two tiles."""
    growth = two - one
    if not growth:
        return one
    if interleaved:
        return -(-n // INTERLEAVED_ROWS) * growth * INTERLEAVED_ROWS // TILE_ROWS
    return n * growth // TILE_ROWS if growth >= TILE_ROWS else -(-n // TILE_ROWS) * growth
