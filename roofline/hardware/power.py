"""Which share of its matrix rate can a device sustain within its power?

The rate of a data sheet assumes the boost clock. A product of large matrices draws more than the device may, so the
clock falls until the power fits: the sustained rate is about (FLOP/s for a watt) times watts. What a watt buys is the
architecture's; fitted on the best bf16 product published for each device (Maximum Achievable Matmul FLOPS of
stas00/ml-engineering: A100 PCIe 253 and SXM 271, H100 795, GH200 829, B200 1745, GB200 1822, B300 1769, MI300X 668,
MI325X 785, MI355X 1565, Gaudi 2 419 and 3 1243 TFLOP/s) and, for Ada, on L40S GEMMs of aiconfigurator (95 % quantile
273 TFLOP/s at 350 W).
"""

from __future__ import annotations

from functools import cache

from membound.roofline.hardware import HardwareSpec

# bf16 FLOP/s for a watt of board power. What is not listed is taken as not bound by power.
_FLOPS_PER_W = {
    "Volta HBM": 0.50e12,
    "Turing GDDR": 0.60e12,
    "Ampere HBM": 0.90e12,
    "Ampere GDDR": 0.55e12,
    "Ada GDDR": 0.80e12,
    "Hopper HBM": 1.25e12,
    "Blackwell HBM": 1.85e12,
    "Blackwell GDDR": 0.95e12,
    "CDNA2 HBM": 0.75e12,
    "CDNA3 HBM": 0.95e12,
    "CDNA4 HBM": 1.20e12,
    "Gaudi HBM": 1.60e12,
}
# How many times the bf16 FLOPs a watt buys in a narrower format. A multiplier of half the width takes less than half
# the energy, but the operands' way to it does not: 1.5 for 8 bits and 2.6 for 4 describe H100, B200 and L40S GEMMs.
_NARROW = {"fp8": 1.5, "int8": 1.6, "fp4": 2.6, "int4": 2.6, "tf32": 0.5, "fp32": 0.25}
_SHARPNESS = 4.0


@cache
def _share(peak: float, sustained: float) -> float:
    return float((1.0 + (peak / sustained) ** _SHARPNESS) ** (-1.0 / _SHARPNESS))


def power_share(hardware: HardwareSpec, dtype: str) -> float:
    """The share of the data sheet's dense rate of `dtype` that the board power sustains, 1 where that is not known."""
    per_w = _FLOPS_PER_W.get(hardware.generation)
    if per_w is None or not hardware.power_w:
        return 1.0
    return _share(hardware.peak_flops(dtype), per_w * _NARROW.get(dtype, 1.0) * hardware.power_w)
