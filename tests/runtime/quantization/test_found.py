"""The blocks of a GGUF mean the same numbers whether they are dequantized or multiplied as they are found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from membound.kernels.dispatch import kernels_for
from membound.kernels.reference import TorchKernels
from membound.roofline.models import ModelSpec
from membound.roofline.techniques import WeightQuantization, engine_setup
from membound.runtime.loading.weights import Weights
from membound.runtime.quantization.found import FoundBlocks
from membound.runtime.quantization.quantized import QuantizationError
from membound.runtime.quantization.recipes import recipe_for

FOUND = (WeightQuantization(format="q4_1", method="found"),)


@pytest.mark.parametrize("kernels", [TorchKernels(), kernels_for("cpu")], ids=lambda kernels: kernels.name)
def test_blocks_are_the_weights_without_their_rounding_to_bf16(
    kernels, smollm2: tuple[ModelSpec, Weights], smollm2_path: Path
) -> None:
    spec, weights = smollm2
    blocks = FoundBlocks(kernels, smollm2_path, spec)
    for part in ("qkv", "o", "gate_up", "down"):  # rows of q and k are in another order in the file
        weight = weights.layers[3][part]
        linear = blocks.linear(f"layers.3.{part}", weight)
        assert linear is not None and linear.shape == tuple(weight.shape)
        n, k = weight.shape
        assert linear.nbytes == n * k * 20 // 32  # Q4_1: 20 bytes for 32 values (ggml-common.h)
        values = linear(torch.eye(k)).T.float()
        assert (values - weight.float()).abs().max() <= weight.float().abs().max() * 2**-8


def test_the_tied_table_is_found_as_the_head(smollm2: tuple[ModelSpec, Weights], smollm2_path: Path) -> None:
    spec, weights = smollm2
    head = FoundBlocks(TorchKernels(), smollm2_path, spec).linear("lm_head", weights.lm_head)
    assert head is not None and head.nbytes == spec.vocab * spec.hidden * 34 // 32  # Q8_0


def test_a_recipe_finds_every_matrix(smollm2: tuple[ModelSpec, Weights], smollm2_path: Path) -> None:
    spec, weights = smollm2
    recipe = recipe_for(FOUND, engine_setup(FOUND).precision, TorchKernels(), None, gguf=smollm2_path)
    assert recipe.prepare(spec, weights) is weights
    assert recipe.linear("layers.0.down", weights.layers[0]["down"]).nbytes == 576 * 1536 * 20 // 32


@pytest.mark.parametrize(
    ("technique", "says"),
    [
        (WeightQuantization(format="q4_k_m", method="found"), "keeps most matrices in Q4_1; give format 'q4_1'"),
        (WeightQuantization(format="q4_1"), "give method 'found'"),
    ],
)
def test_what_the_file_does_not_hold_is_one_sentence(
    technique, says: str, smollm2: tuple[ModelSpec, Weights], smollm2_path: Path
) -> None:
    plan = engine_setup((technique,)).precision
    with pytest.raises(QuantizationError, match=says):
        recipe_for((technique,), plan, TorchKernels(), None, gguf=smollm2_path).prepare(*smollm2)


def test_without_a_gguf_nothing_is_found() -> None:
    with pytest.raises(QuantizationError, match="give one as field 'weights'"):
        recipe_for(FOUND, engine_setup(FOUND).precision, TorchKernels(), None)
