"""What is predicted but does not run yet is refused in one sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from membound.roofline.models import get_model
from membound.roofline.parallel import Parallelism
from membound.roofline.techniques import TECHNIQUES, EngineSetup, WeightQuantization, engine_setup
from membound.runtime.refusals import unmeasured

# What several devices do at a time, which processes on one machine would only slow down.
PREDICTED_ONLY = {"expert_balancing", "dual_batch_overlap"}


@pytest.mark.parametrize("name", TECHNIQUES)
def test_every_technique_runs_or_says_that_it_is_only_predicted(name):
    problem = unmeasured(TECHNIQUES[name]().apply(EngineSetup()))
    assert f"{name} is predicted, not measured yet" in (problem or "") if name in PREDICTED_ONLY else problem is None


def test_a_model_that_is_published_quantized_runs_in_16_bits_only():
    published = get_model("gpt-oss-20b").published
    assert "weights in mxfp4 is predicted" in unmeasured(engine_setup((), published=published))
    assert unmeasured(engine_setup((), published=published), mxfp4=True) is None  # by the Triton kernels
    assert unmeasured(engine_setup((WeightQuantization(format="bf16"),), published=published)) is None


def test_several_devices_and_unfused_attention_are_only_predicted():
    staged = unmeasured(replace(EngineSetup(), parallel=Parallelism(pp=2)))
    assert "parallelism other than tp and ep on 2 devices is predicted" in staged
    assert "writes its scores to memory is predicted" in unmeasured(replace(EngineSetup(), fused_attention=False))
