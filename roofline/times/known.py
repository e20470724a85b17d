"""Which times are known for a device: its own calibration, fitted kernels, or its bare roofs?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from membound.roofline.hardware import HardwareSpec
from membound.roofline.models import ModelSpec
from membound.roofline.operators import Operator
from membound.roofline.shape import Count, StepShape
from membound.roofline.times.calibrated import CalibratedTimes
from membound.roofline.times.engines import EngineProfile, get_profile
from membound.roofline.times.kernels import KernelTimes
from membound.roofline.times.operator import HasTotal, OperatorTime, Times, expert_moves_s


class RoofTimes:
    """The bare roofs: every operator at full bandwidth, full rate and full link, and nothing else. A lower bound."""

    needs_working_set = False
    relative_error = 0.0

    def __init__(self, hardware: HardwareSpec) -> None:
        self.hardware = hardware
        self.activation_bytes = 4.0 if hardware.kind == "cpu" else 2.0

    def spread_of(self, operator: Operator) -> float:
        return 0.0

    def waiting_s(self, costs: Sequence[HasTotal], model: ModelSpec, shape: StepShape) -> Count | None:
        return None

    def of(self, operator: Operator, working_set_bytes: float) -> OperatorTime:
        if operator.kind == "expert_moves":
            return expert_moves_s(operator, self.hardware)
        if operator.collective is not None:
            link = self.hardware.scale_up or self.hardware.scale_out or self.hardware.host
            link_s = operator.link_bytes / link.bandwidth_bytes_per_s if link else 0.0
            return OperatorTime(link_s, 0.0, 0.0, 0.0, link_s)
        # Activations may stay in the cache from one kernel to the next; weights and KV have to come from memory.
        memory_s = (operator.weight_bytes + operator.kv_bytes) / self.hardware.bandwidth_bytes_per_s
        compute_s = operator.flops / max(self.hardware.matrix_flops.values())
        return OperatorTime(np.maximum(memory_s, compute_s), memory_s, compute_s, 0.0)


def times_for(hardware: HardwareSpec, profile: str | EngineProfile = "graphs") -> Times:
    """The best times that are known for a device: its own calibration, else the kernels of it or of its relatives."""
    if hardware.calibration is not None:
        return CalibratedTimes(hardware, hardware.calibration)
    # Reading tables and fitting come with this module, which a calibrated machine never needs.
    from membound.roofline.times.device_fits import fits_for

    return KernelTimes(hardware, get_profile(profile) if isinstance(profile, str) else profile, fits_for(hardware))
