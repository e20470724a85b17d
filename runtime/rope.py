"""By which angles does rotary embedding turn a head at each position?"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from membound.roofline.models import Llama3RopeScaling, ModelSpec
from membound.runtime.arithmetic import Arithmetic, LinearScaling, YarnScaling

FIRST_POSITIONS = 131_072


class RopeTables:
    """cos and sin of every position's rotation, each [positions, head_dim / 2] in fp32.

    `frequencies` [head_dim / 2] are radians a position. Elements of frequency 0 are not turned, and not multiplied by
    `magnitude` either. Of more than `FIRST_POSITIONS` the tables are made when a cache has room for them: those of a
    model for ten million tokens would take gigabytes.
    """

    def __init__(self, frequencies: Tensor, most: int, magnitude: float = 1.0) -> None:
        self.frequencies = frequencies
        self.most = most
        self.magnitude = magnitude
        self.cos = self.sin = frequencies.new_empty(0, len(frequencies))
        self.reach(FIRST_POSITIONS)

    def reach(self, positions: int) -> None:
        """Makes tables of that many positions, unless the model has fewer or they are there."""
        positions = min(positions, self.most)
        if positions > len(self.cos):
            at = torch.arange(positions, dtype=torch.float32, device=self.frequencies.device)
            angles = torch.outer(at, self.frequencies)
            size = torch.where(self.frequencies == 0, 1.0, self.magnitude)
            self.cos, self.sin = angles.cos() * size, angles.sin() * size


def rope_tables(
    spec: ModelSpec,
    arithmetic: Arithmetic,
    head_dim: int,
    rotated: int,
    *,
    windowed: bool = False,
    factors: Tensor | None = None,
    device: torch.device | None = None,
) -> RopeTables:
    """The tables of heads of `head_dim` elements, of which `rotated` are turned: those whose pairs come first.

    `factors` [rotated / 2] divide the frequencies in place of what the spec says (a GGUF's tensor).
    """
    own_theta = arithmetic.windowed_rope_theta if windowed else None
    frequencies = rope_frequencies(own_theta or spec.rope_theta, rotated)
    magnitude = 1.0
    if own_theta is None:
        scaling = arithmetic.rope_scaling or spec.rope_scaling
        if factors is not None:
            frequencies = frequencies / factors.cpu()
        elif isinstance(scaling, Llama3RopeScaling):
            frequencies = frequencies / llama3_rope_factors(frequencies, scaling)
        elif isinstance(scaling, LinearScaling):
            frequencies = frequencies / scaling.factor
        elif isinstance(scaling, YarnScaling):
            frequencies = frequencies / _yarn_factors(spec.rope_theta, rotated, scaling)
            magnitude = scaling.magnitude
    kept = torch.zeros(head_dim // 2)
    kept[: rotated // 2] = frequencies
    return RopeTables(kept.to(device), spec.max_context, magnitude)


def unrotated_tables(head_dim: int, positions: int, device: torch.device | None = None) -> RopeTables:
    """The tables of layers without positions."""
    return RopeTables(torch.zeros(head_dim // 2, device=device), positions)


def rope_frequencies(theta: float, rotated: int) -> Tensor:
    """Radians a position by which rotary embedding turns each pair, before any scaling: [rotated / 2], fp32."""
    return theta ** (-torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)


def llama3_rope_factors(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """How much Llama 3.1 slows each rotation: by `factor` below a frequency, not at all above another.

    Between the two it changes smoothly. Hugging Face `modeling_rope_utils._compute_llama3_parameters`, [head_dim / 2].
    """
    turns = scaling.original_max_context * frequencies / (2 * math.pi)  # full turns within the original context
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return 1 / ((1 - smooth) / scaling.factor + smooth)


def _yarn_factors(theta: float, rotated: int, scaling: YarnScaling) -> Tensor:
    """How much YaRN slows each rotation [rotated / 2] (arXiv 2309.00071, section 3.2).

    A pair that turns more than `beta_fast` times in the original context is kept, one that turns less than `beta_slow`
    times is slowed by the whole factor; between them the share is linear in the number of the pair.
    """

    def pair_with(turns: float) -> float:
        return rotated * math.log(scaling.original_max_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    pairs = torch.arange(rotated // 2, dtype=torch.float32)
    slowed = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return 1 / (slowed / scaling.factor + 1 - slowed)
