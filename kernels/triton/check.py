"""Would a kernel read or write outside of what it was given? Asked of every argument before the launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
Size = int | None


def require(condition: bool, argument: str, problem: str) -> None:
    """Raises ValueError, which names the argument, unless `condition` holds."""
    if not condition:
        raise ValueError(f"{argument}: {problem}")


def tensor(
    argument: str, value: Tensor, shape: Sequence[Size], dtypes: Sequence[torch.dtype], like: Tensor | None = None
) -> None:
    """A contiguous tensor of this shape (None fits any size) and one of `dtypes`, on the device of `like`."""
    strided(argument, value, shape, dtypes, like, free=0)


def strided(
    argument: str,
    value: Tensor,
    shape: Sequence[Size],
    dtypes: Sequence[torch.dtype],
    like: Tensor | None = None,
    free: int = 1,
) -> None:
    """As `tensor`, but the first `free` dimensions may have any stride."""
    if value.dtype not in dtypes:
        raise ValueError(f"{argument}: dtype is {value.dtype}, should be {' or '.join(map(str, dtypes))}")
    if value.dim() != len(shape) or any(w is not None and w != s for w, s in zip(shape, value.shape, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{argument}: shape is {list(value.shape)}, should be [{wanted}]")
    if like is not None and value.device != like.device:
        raise ValueError(f"{argument}: is on {value.device}, should be on {like.device} like the others")
    expected = 1
    for size, stride in zip(reversed(value.shape[free:]), reversed(value.stride()[free:]), strict=True):
        if size != 1 and stride != expected:
            raise ValueError(f"{argument}: strides are {value.stride()}, dimensions from {free} on should be dense")
        expected *= size
