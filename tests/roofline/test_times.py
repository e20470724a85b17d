"""Laws of calibrated times, on tables made of known physics: a launch, bytes at a bandwidth, FLOPs at a rate."""

from __future__ import annotations

import numpy as np
import pytest

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec
from membound.roofline.hardware.calibration import CACHE_SET_BYTES, BandwidthPoint, Calibration, LinearCost, LinearTable
from membound.roofline.models import get_model
from membound.roofline.operators import Operator, linear
from membound.roofline.precision import PRECISIONS
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import EngineSetup
from membound.roofline.times.calibrated import CalibratedTimes

LAUNCH_S = 5e-6
MEMORY, CACHE = 30e9, 60e9
FLOPS_PER_S = 150e9
N, K, M = [256, 1024, 4096], [256, 1024, 4096], [1, 2, 4, 8, 16, 64]
MEMORY_SET_BYTES = 2**30


def _physics_s(n: float, k: float, m: float, bandwidth: float) -> float:
    return LAUNCH_S + 2.0 * n * k / bandwidth + 2.0 * n * k * m / FLOPS_PER_S


def _grid(bandwidth: float) -> list[list[list[float]]]:
    return [[[_physics_s(n, k, m, bandwidth) for m in M] for k in K] for n in N]


@pytest.fixture(scope="module")
def times() -> CalibratedTimes:
    call = {"call": 1e-5}
    calibration = Calibration(
        created="2026-11-29T12:00:00+00:00",
        machine="test",
        kind="cpu",
        threads=2,
        kernels="test",
        versions={},
        memory_bytes=2**34,
        bandwidth=[
            BandwidthPoint(working_set_bytes=size, bytes_per_s=rate)
            for size, rate in ((2**18, 200e9), (CACHE_SET_BYTES, CACHE), (2**27, 40e9), (MEMORY_SET_BYTES, MEMORY))
        ],
        linear={"bf16": LinearTable(n=N, k=K, m=M, memory_s=_grid(MEMORY), cache_s=_grid(CACHE))},
        operators={
            **dict.fromkeys(("rms_norm", "rope_and_store", "silu_mul", "embed"), LinearCost(seconds=call)),
            "attention": LinearCost(
                seconds={"call": 1e-5, "sequences": 1e-6, "kv_bytes": 1e-10, "flops": 1e-11, "activation_bytes": 1e-10}
            ),
            "host": LinearCost(seconds={"call": 1e-4, "sequences": 1e-5, "tokens": 1e-7, "logits": 1e-9}),
        },
        repeatability=0.05,
        residual=0.08,
    )
    hardware = HardwareSpec(
        name="local",
        vendor="test",
        kind="cpu",
        memory_bytes=2**34,
        bandwidth_bytes_per_s=MEMORY,
        matrix_flops={},
        source="test",
    )
    return CalibratedTimes(hardware, calibration)


def _linear_s(times: CalibratedTimes, n: int, k: int, m: object, working_set_bytes: float = MEMORY_SET_BYTES) -> object:
    return times.of(linear("x", 1, m, n, k, PRECISIONS["bf16"], 4.0), working_set_bytes).time_s  # type: ignore[arg-type]


@pytest.mark.parametrize("n", N)
@pytest.mark.parametrize("k", K)
def test_a_linear_on_the_grid_takes_what_was_measured(times: CalibratedTimes, n: int, k: int) -> None:
    for m in M:
        assert _linear_s(times, n, k, m) == pytest.approx(_physics_s(n, k, m, MEMORY))
        assert _linear_s(times, n, k, m, CACHE_SET_BYTES) == pytest.approx(_physics_s(n, k, m, CACHE))


def test_between_grid_points_a_coarse_grid_is_exact_while_one_roof_holds(times: CalibratedTimes) -> None:
    for n, k, m in ((960, 576, 3), (576, 1536, 13), (3072, 576, 40)):
        assert _linear_s(times, n, k, m) == pytest.approx(_physics_s(n, k, m, MEMORY), rel=1e-9)


def test_more_tokens_never_take_less_time(times: CalibratedTimes) -> None:
    seconds = np.asarray(_linear_s(times, 700, 900, np.arange(1.0, 300.0)))
    assert (np.diff(seconds) > 0).all()


def test_an_array_of_tokens_gives_what_each_alone_gives(times: CalibratedTimes) -> None:
    tokens = np.array([1.0, 3.0, 16.0, 500.0])
    assert _linear_s(times, 700, 900, tokens) == pytest.approx([_linear_s(times, 700, 900, m) for m in tokens])


def test_a_cached_weight_is_never_slower_and_the_middle_lies_between(times: CalibratedTimes) -> None:
    cached, middle, uncached = (_linear_s(times, 700, 900, 2, size) for size in (2**20, 2**27, 2**31))
    assert cached < middle < uncached  # type: ignore[operator]


def test_a_weight_smaller_than_the_cached_set_is_as_fast_as_the_table_knows(times: CalibratedTimes) -> None:
    assert _linear_s(times, 700, 900, 2, 2**18) == _linear_s(times, 700, 900, 2, CACHE_SET_BYTES)


def test_beyond_the_grid_the_efficiency_of_its_edge_holds(times: CalibratedTimes) -> None:
    edge = _linear_s(times, 4096, 4096, 64)
    assert _linear_s(times, 8192, 4096, 64) == pytest.approx(2 * edge)  # type: ignore[operator]
    assert _linear_s(times, 4096, 8192, 128) == pytest.approx(4 * edge)  # type: ignore[operator]


def test_below_the_grid_the_smallest_shape_s_time_holds(times: CalibratedTimes) -> None:
    assert _linear_s(times, 64, 64, 1) == _linear_s(times, 256, 256, 1)


def test_a_format_that_was_not_measured_is_refused_with_those_that_were(times: CalibratedTimes) -> None:
    operator = linear("x", 1, 1, 256, 256, PRECISIONS["int8"], 4.0)
    with pytest.raises(MemboundError, match="no int8 weights; it has bf16"):
        times.of(operator, 1.0)


def test_an_operator_that_was_not_measured_is_refused(times: CalibratedTimes) -> None:
    with pytest.raises(MemboundError, match="has no operator 'add_rms_norm'"):
        times.of(Operator("norm", "add_rms_norm", 1), 1.0)


def test_every_operator_of_a_step_finds_the_terms_of_its_cost(times: CalibratedTimes) -> None:
    shape = StepShape.decode(4, 100)
    by_kind = {op.kind: op for op in step_operators(get_model("SmolLM2-135M"), EngineSetup(), shape)}
    attention, host = by_kind["attention"], by_kind["host"]
    assert times.of(host, 1.0).time_s == pytest.approx(1e-4 + 4e-5 + 4e-7 + 4 * 49152 * 1e-9)
    expected = 1e-5 + 4e-6 + 1e-10 * (attention.kv_bytes + attention.activation_bytes) + 1e-11 * attention.flops
    assert times.of(attention, 1.0).time_s == pytest.approx(expected)


def test_the_interval_is_the_larger_of_residual_and_repeatability(times: CalibratedTimes) -> None:
    assert times.relative_error == 0.08
