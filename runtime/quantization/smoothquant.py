"""SmoothQuant: how is the difficulty of outlier channels moved from activations into weights?

Xiao et al., SmoothQuant, 2022, arXiv 2211.10438, equation 4: inputs are divided by s and weights multiplied, with
s_j = max|x_j|^alpha / max|w_j|^(1 - alpha).
"""

from __future__ import annotations

from torch import Tensor

from membound.runtime.quantization.quantized import QuantizationError, checked


def smoothing_scales(weight: Tensor, max_abs: Tensor, alpha: float = 0.5) -> Tensor:
    """The scales s [k] of a weight [n, k] whose inputs reach `max_abs` [k]; 1 where a channel is never used."""
    if not 0 <= alpha <= 1:
        raise QuantizationError(f"alpha is {alpha}; give 0 (all difficulty stays in the activations) to 1 (none)")
    largest = checked(weight).abs().amax(0)
    scales = max_abs**alpha / largest.clamp(min=1e-8) ** (1 - alpha)
    return scales.where((max_abs > 0) & (largest > 0), scales.new_ones(()))
