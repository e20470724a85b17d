"""LLM.int8(): which input channels are too large for 8 bits, so that they are multiplied in 16 bits beside the rest?

Dettmers et al., LLM.int8(), 2022, arXiv 2208.07339, section 3.2: channels that reach 6 or more are outliers. The paper
looks at the inputs of each call; here calibration names the channels once, so that they are laid out together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from membound.runtime.quantization.quantized import Grid, QuantizationError, Quantized, checked
from membound.runtime.quantization.rtn import round_to_nearest

THRESHOLD = 6.0


@dataclass(frozen=True)
class Split:
    """A weight in two parts: int8 with zeros in the outlier columns, and those columns as they were."""

    regular: Quantized  # [n, k]
    columns: Tensor  # [outliers] int64
    outliers: Tensor  # [n, outliers] in bf16

    def dequantized(self) -> Tensor:
        """The values of both parts together, [n, k] in fp32."""
        values = self.regular.dequantized()
        values[:, self.columns] = self.outliers.float()
        return values


def split_outliers(weight: Tensor, max_abs: Tensor, threshold: float = THRESHOLD) -> Split:
    """Weight [n, k] split at the channels whose inputs reach `threshold`, the rest with one scale a row."""
    if not threshold > 0:
        raise QuantizationError(f"threshold is {threshold}; give the magnitude above 0 from which a channel stands out")
    weight = checked(weight)
    columns = (max_abs >= threshold).nonzero().flatten()
    regular = weight.clone()
    regular[:, columns] = 0
    return Split(round_to_nearest(regular, Grid(8)), columns, weight[:, columns].to(torch.bfloat16))
