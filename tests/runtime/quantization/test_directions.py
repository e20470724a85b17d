"""On real weights the methods do what their papers show: calibrated ones lose less than those that look at nothing.

Only the last layers of SmolLM2-135M are quantized or pruned and 512 tokens are judged, so that this takes a minute;
`tests/bench/quantizers.py` does the same with whole models and more text. The file's weights were 4-bit once (Q4_1,
groups of 32), so that 4 bits here have groups of 64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch

from membound.kernels.base import PackedWeight, WeightFormat
from membound.kernels.reference import TorchKernels
from membound.roofline.models import ModelSpec
from membound.roofline.precision.plan import plan_of
from membound.runtime.decoder import Decoder
from membound.runtime.loading.weights import Weights
from membound.runtime.quality.reading import perplexity
from membound.runtime.quality.texts import calibration_windows, windows
from membound.runtime.quantization.calibration import Calibrator
from membound.runtime.quantization.magnitude import prune_by_magnitude
from membound.runtime.quantization.recipes import QUANTIZERS, QuarotRecipe
from membound.runtime.quantization.sparsegpt import sparsegpt
from membound.runtime.quantization.wanda import wanda
from membound.runtime.recipe import Recipe
from membound.runtime.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

KEPT_LAYERS = 24  # of 30


class WideKernels(TorchKernels):
    """Plain PyTorch that multiplies in fp32, which is faster than bf16 on a CPU without matrix units."""

    def pack(self, weight: torch.Tensor, format: WeightFormat, group_size: int | None = None) -> PackedWeight:
        return super().pack(weight, "fp32" if format == "bf16" else format, group_size)


@dataclass
class Judge:
    """The model, what it is calibrated on, and the other text that it is judged by."""

    spec: ModelSpec
    weights: Weights
    kernels: TorchKernels
    calibrator: Calibrator
    texts: tuple[tuple[int, ...], ...]

    @cached_property
    def plain(self) -> float:
        """The perplexity of the model as it is."""
        return self.perplexity()

    def perplexity(self, recipe: Recipe | None = None, weights: Weights | None = None) -> float:
        decoder = Decoder(self.spec, weights or self.weights, self.kernels, recipe or "bf16")
        return perplexity(decoder, self.texts)

    def quantized(self, method, format: str, activations: str | None = None, kept: int = KEPT_LAYERS) -> float:
        plan = plan_of(format, activations, plain_first_layers=kept)
        return self.perplexity(QUANTIZERS[method](self.kernels, plan, self.calibrator))

    def pruned(self, method: str, pattern) -> float:
        layers = list(self.weights.layers)
        for index in range(KEPT_LAYERS, len(layers)):
            for part in ("qkv", "o", "gate_up", "down"):
                weight = layers[index][part]
                inputs = self.calibrator.statistics(self.spec, self.weights)[f"layers.{index}.{part}"]
                if method == "magnitude":
                    pruned = prune_by_magnitude(weight, 0.5, pattern)
                elif method == "wanda":
                    pruned = wanda(weight, inputs.mean_square, 0.5, pattern)
                else:
                    pruned = sparsegpt(weight, inputs.moments, 0.5, pattern)
                layers[index] = {**layers[index], part: pruned.weight.to(weight.dtype)}
        return self.perplexity(weights=replace(self.weights, layers=tuple(layers)))


@pytest.fixture(scope="module")
def judge(smollm2: tuple[ModelSpec, Weights], tokenizer: Tokenizer) -> Iterator[Judge]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two that wait for each other are slower than one where other tests run beside them
    kernels = WideKernels()
    calibrator = Calibrator(kernels, calibration_windows(tokenizer, 1024))
    yield Judge(*smollm2, kernels, calibrator, windows(tokenizer, "english", "evaluation", 512).token_ids)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("format", ["int3_g64", "int4_g64"])
def test_gptq_and_awq_beat_rounding_to_nearest(judge: Judge, format: str) -> None:
    nearest = judge.quantized("rtn", format)
    assert nearest > judge.plain
    for method in ("gptq", "awq"):
        assert judge.quantized(method, format) < nearest


def test_rotation_beats_plain_rounding_at_four_bits_for_both(judge: Judge) -> None:
    formats = ("int4_g64", "int4_row")
    plan = plan_of(*formats)  # the rotated model is rounded to nearest too: what helps here is the rotation alone
    turned = judge.perplexity(QuarotRecipe(judge.kernels, plan))
    assert turned < 0.5 * judge.quantized("rtn", *formats, kept=0)


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
def test_wanda_and_sparsegpt_beat_magnitude(judge: Judge, pattern: str) -> None:
    magnitude = judge.pruned("magnitude", pattern)
    assert magnitude > judge.plain
    assert judge.pruned("wanda", pattern) < magnitude
    assert judge.pruned("sparsegpt", pattern) < magnitude
