"""Are mixtures and recurrent states measured as the roofline counts them, and predicted from that?"""

from __future__ import annotations

import numpy as np
import pytest

from membound.kernels.reference import TorchKernels
from membound.roofline.hardware import hardware_of
from membound.roofline.hardware.calibration import BandwidthPoint, Calibration, LinearCost, LinearTable
from membound.roofline.models import get_model
from membound.roofline.models.recurrent import Mamba2
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import EngineSetup
from membound.roofline.times.calibrated import CalibratedTimes
from membound.runtime.calibration.layers import LAYER_KINDS, LayerGrid, LayerProbe
from membound.runtime.calibration.operators import Load
from membound.runtime.calibration.stopwatch import Stopwatch

STATE = Mamba2(heads=2, head_dim=16, d_state=16)
GRID = LayerGrid(
    tokens=(1, 8), hidden=(64,), experts=((4, 2),), states=(STATE,), loads=(Load(2, 8), Load(1, 8, 8)), whole_layers=1
)


@pytest.fixture(scope="module")
def probe() -> LayerProbe:
    kernels = TorchKernels()
    return LayerProbe(kernels, Stopwatch(kernels, "cpu"), GRID)


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_every_size_has_a_time(kind: str, probe: LayerProbe) -> None:
    seconds = list(probe.measure(kind))
    assert len(seconds) == len(probe.amounts(kind)) and min(seconds) > 0


def test_a_state_is_measured_in_the_terms_of_its_operator(probe: LayerProbe) -> None:
    spec = get_model("Mamba-2-130M").model_copy(update={"attention": STATE, "hidden": 16, "layers": 1})
    shape = StepShape.of([(7, 1, 1)] * 2)
    state = next(op for op in step_operators(spec, EngineSetup(), shape) if op.kind == "recurrent")
    amounts = probe.amounts("recurrent")[0]
    assert (amounts["elements"], amounts["sequences"], amounts["flops"]) == (2, 2, state.flops)
    assert amounts["kv_bytes"] == pytest.approx(state.kv_bytes, rel=0.2)  # convolutions are kept in fp32 here


def calibration(**operators: LinearCost) -> Calibration:
    """A machine of 10 GB/s without anything else but a microsecond a linear."""
    axis, rows = [16, 65536], [1, 65536]
    seconds = [[[1e-6 + 2 * n * k / 1e10 for _ in rows] for k in axis] for n in axis]
    usual = dict.fromkeys(("rms_norm", "add_rms_norm", "rope_and_store", "silu_mul", "embed", "attention", "host"))
    return Calibration(
        created="2026-01-01",
        machine="a test",
        kind="cpu",
        threads=1,
        kernels="none",
        versions={},
        memory_bytes=10**10,
        bandwidth=[BandwidthPoint(working_set_bytes=size, bytes_per_s=1e10) for size in (10**6, 10**9)],
        linear={"bf16": LinearTable(n=axis, k=axis, m=rows, memory_s=seconds, cache_s=seconds)},
        operators={name: LinearCost(seconds={}) for name in usual} | operators,
        repeatability=0.0,
        residual=0.0,
    )


def test_a_kind_of_layer_that_was_measured_itself_takes_its_own_time() -> None:
    found = calibration(
        recurrent=LinearCost(seconds={"call": 1e-4}), recurrent_rwkv7=LinearCost(seconds={"call": 3e-3})
    )
    times = CalibratedTimes(hardware_of(found), found)
    for name, expected_s in (("RWKV-7-0.4B", 3e-3), ("Mamba-2-130M", 1e-4)):
        operators = step_operators(get_model(name), EngineSetup(), StepShape.decode(1, 100))
        state = next(op for op in operators if op.kind == "recurrent")
        assert times.of(state, 1e9).time_s == pytest.approx(expected_s)


def test_experts_take_the_time_of_linears_that_read_their_bytes() -> None:
    """One token: two experts of Mixtral at 10 GB/s, and what choosing them costs on top."""
    found = calibration(moe=LinearCost(seconds={"call": 1e-3, "experts": 1e-2, "elements": 1e-1}))
    times = CalibratedTimes(hardware_of(found), found)
    experts = next(
        op
        for op in step_operators(get_model("Mixtral-8x7B"), EngineSetup(), StepShape.decode(1, 100))
        if op.kind == "moe"
    )
    time = times.of(experts, 1e9)
    overhead = 1e-3 + 2 * 1e-2 + 2 * 1e-1
    assert time.time_s == pytest.approx(float(np.asarray(experts.weight_bytes)) / 1e10 + overhead, rel=0.01)
    assert time.overhead_s == pytest.approx(overhead)
