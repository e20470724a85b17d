"""What is predicted but does not run yet is refused in one sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from membound.roofline.models import get_model
from membound.roofline.parallel import Parallelism
from membound.roofline.techniques import TECHNIQUES, EngineSetup, WeightQuantization, engine_setup
from membound.runtime.refusals import unmeasured

RUNS = (
    "int8_weights",
    "weight_quantization",
    "w8a8",
    "sparsity_2_4",
    "expert_offload",
    "continuous_batching",
    "kv_quantization",
    "kv_eviction",
    "ngram_speculation",
    "flash_attention",
    "mla_absorption",
)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_runs_or_says_that_it_is_only_predicted(name):
    problem = unmeasured(TECHNIQUES[name]().apply(EngineSetup()))
    if name in RUNS:
        assert problem is None
    else:
        assert problem is not None and "is predicted, not measured yet: the runtime has " in problem
        assert "\n" not in problem


def test_a_model_that_is_published_quantized_runs_in_16_bits_only():
    published = get_model("gpt-oss-20b").published
    assert "weights in mxfp4 is predicted" in unmeasured(engine_setup((), published=published))
    assert unmeasured(engine_setup((WeightQuantization(format="bf16"),), published=published)) is None


def test_several_devices_and_unfused_attention_are_only_predicted():
    staged = unmeasured(replace(EngineSetup(), parallel=Parallelism(pp=2)))
    assert "parallelism other than tp and ep on 2 devices is predicted" in staged
    assert "writes its scores to memory is predicted" in unmeasured(replace(EngineSetup(), fused_attention=False))
