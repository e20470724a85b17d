"""Tensors without data, in the sizes with which serving launches kernels: nothing that reads one can wait for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

META = torch.device("meta")
SEQUENCES, BLOCK_SIZE, BLOCKS_A_SEQUENCE = 16, 16, 512


def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def floats(*shape: int) -> Tensor:
    return of(*shape, dtype=torch.float32)


def ints(*shape: int) -> Tensor:
    return of(*shape, dtype=torch.int32)
