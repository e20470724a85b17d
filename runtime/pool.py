"""Where do a micro-benchmark's weights and cached keys lie, so that they come from memory?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from membound.kernels.arena import Arena
from membound.kernels.base import PackedWeight, WeightFormat

_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
# Every byte alike, so that the same memory reads as 0.0115 in fp32 and bf16 and as 60 in int8.
_BYTE = 0x3C


class Pool:
    """One large buffer whose parts are handed out in turn, so that a part was last read a whole round ago."""

    def __init__(self, buffer: Tensor) -> None:
        self.bytes = buffer
        self._next = 0
        self._scales: dict[int, Tensor] = {}

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
        self, format: WeightFormat, n: int, k: int, count: int, within_bytes: int | None = None
    ) -> list[PackedWeight]:
        """`count` weights [n, k] in the plain layout of every format: rows of k elements, int8 with a scale a row."""
        scale = None
        if format == "int8":
            scale = self._scales.setdefault(n, torch.full((n,), 0.01, device=self.bytes.device))
        parts = self.parts(weight_bytes(format, n, k), count, within_bytes)
        return [PackedWeight(format, part.view(_DTYPES[format]).view(n, k), scale) for part in parts]

    def blocks(self, shape: Sequence[int], dtype: torch.dtype, count: int) -> list[Tensor]:
        """`count` tensors of a shape and type."""
        elements = torch.Size(shape).numel()
        return [part.view(dtype).view(*shape) for part in self.parts(elements * dtype.itemsize, count)]


def weight_bytes(format: WeightFormat, n: int, k: int) -> int:
    return n * k * _DTYPES[format].itemsize
