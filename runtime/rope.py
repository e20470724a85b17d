"""By which angle is a head turned at each position?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeTables:
    """cos and sin of every position's rotation, each [positions, head_dim / 2] in fp32."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, frequencies: Tensor, positions: int) -> RopeTables:
        """The tables of `positions` positions for `frequencies` [head_dim / 2], in radians a position."""
        at = torch.arange(positions, dtype=torch.float32, device=frequencies.device)
        angles = torch.outer(at, frequencies)
        return cls(angles.cos(), angles.sin())
