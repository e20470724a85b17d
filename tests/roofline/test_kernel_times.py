"""Kernels that no table has take about as long as those who wrote them say."""

from __future__ import annotations

import pytest

from membound.roofline.hardware import get_hardware
from membound.roofline.models import get_model
from membound.roofline.operators import Operator
from membound.roofline.parallel import Parallelism
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import EngineSetup
from membound.roofline.times.known import times_for

H800 = times_for(get_hardware("H800-SXM5"))


def latents(tp: int) -> Operator:
    """Attention of DeepSeek-V3 to its latents, of 128 sequences of 16k tokens, on one of `tp` devices."""
    setup, shape = EngineSetup(parallel=Parallelism(tp=tp)), StepShape.decode(128.0, 16384.0)
    found = (op for op in step_operators(get_model("DeepSeek-V3"), setup, shape, 2.0) if op.heads is not None)
    return next(op for op in found if op.heads is not None and op.heads.latents)


def test_attention_to_latents_computes_as_fast_as_flashmla():
    """580 TFLOP/s on an H800 where computing binds (FlashMLA's README, February 2025)."""
    operator = latents(1)
    assert float(operator.flops) / float(H800.of(operator, 0.0).time_s) == pytest.approx(580e12, rel=0.15)


def test_attention_to_latents_reads_as_fast_as_flashmla_where_few_heads_share_them():
    """3,000 GB/s on an H800 where memory binds (the same)."""
    operator = latents(8)
    assert float(operator.kv_bytes) / float(H800.of(operator, 0.0).time_s) == pytest.approx(3000e9, rel=0.25)


def test_heads_of_several_devices_share_the_tile_that_each_computes_whole():
    """Fewer heads than a tile has rows leave it partly empty: 16 heads take as long as 64, and 128 take longer."""
    seconds = {tp: float(H800.of(latents(tp), 0.0).time_s) for tp in (1, 2, 8)}
    assert seconds[8] == pytest.approx(seconds[2], rel=1e-6) and seconds[1] > 1.3 * seconds[2]
