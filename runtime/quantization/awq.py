"""AWQ: which input channels does a weight have to keep exact, and by how much are they scaled up for that?

Lin et al., AWQ: activation-aware weight quantization, 2023, arXiv 2306.00978, section 3.2. A channel's weights are
multiplied by its scale before they are rounded, and its inputs are divided by it. The output error that the search
minimizes is exact, as the inputs' second moments give it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from membound.runtime.quantization.quantized import Grid, Quantized, checked
from membound.runtime.quantization.ranges import output_error, search_shrinks
from membound.runtime.quantization.rtn import round_to_nearest
from membound.runtime.quantization.statistics import InputStatistics

EXPONENTS = 20  # of the mean magnitude that are tried, from 0 to below 1
ROWS = 256  # of a matrix, evenly spread, on which a search for the scales of its columns looks


def round_clipped(weight: Tensor, inputs: InputStatistics, grid: Grid) -> Quantized:
    """Weight [n, k] rounded to nearest on the ranges that cost its output least."""
    return round_to_nearest(weight, grid, search_shrinks(checked(weight), inputs.moments, grid))


def search_scales(weight: Tensor, inputs: InputStatistics, grid: Grid, magnitude: Tensor | None = None) -> Tensor:
    """The scales [k] = magnitude^exponent, their extremes around 1, with the least output error.

    `magnitude` [k] is the mean |x| unless channels have to share their scales and so bring a common one.
    """
    weight = checked(weight)[:: max(1, len(weight) // ROWS)]
    magnitude = inputs.mean_abs if magnitude is None else magnitude
    magnitude = magnitude.clamp(min=1e-4 * float(magnitude.max()) + 1e-12)
    best, least = torch.ones_like(magnitude), float("inf")
    for step in range(EXPONENTS):
        scales = magnitude ** (step / EXPONENTS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        rounded = round_to_nearest(weight * scales, grid).dequantized() / scales
        error = output_error(weight - rounded, inputs.moments)
        if error < least:
            best, least = scales, error
    return best
