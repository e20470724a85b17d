"""Which recipe quantizes or prunes a model's weights by which method, and what does it need?

Every method is a recipe of the decoder: what concerns several matrices is done in `prepare`, and each matrix becomes a
linear of its own. Tables and routers stay as the precision plan says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from membound.kernels.base import Kernels
from membound.roofline.models import ModelSpec
from membound.roofline.precision import GGML_BLOCKS, GGML_MIXES, PRECISIONS, Precision
from membound.roofline.precision.plan import PrecisionPlan
from membound.roofline.techniques import W8A8, Sparsity24, Technique, WeightQuantization
from membound.roofline.techniques.weights import QuantizationMethod
from membound.runtime.linear import KernelLinear, Linear
from membound.runtime.loading.weights import Weights
from membound.runtime.quantization.awq import round_clipped, search_scales
from membound.runtime.quantization.calibration import Calibrator, Statistics
from membound.runtime.quantization.folding import Folder
from membound.runtime.quantization.found import FoundBlocks
from membound.runtime.quantization.fp8 import Float8, Granularity, to_fp8
from membound.runtime.quantization.gptq import gptq
from membound.runtime.quantization.hadamard import rotation
from membound.runtime.quantization.linears import (
    Changed,
    ChangedInput,
    EmulatedLinear,
    SplitLinear,
    fp8_linear,
    fp8_w8a8_linear,
    int8_linear,
    integer_linear,
    rounding,
    w4a8_linear,
)
from membound.runtime.quantization.outliers import split_outliers
from membound.runtime.quantization.pruning import PruningRecipe
from membound.runtime.quantization.quantized import Grid, QuantizationError, Quantized
from membound.runtime.quantization.quarot import rotated, rotated_moments
from membound.runtime.quantization.rtn import round_to_nearest
from membound.runtime.quantization.smoothquant import smoothing_scales
from membound.runtime.recipe import Recipe

CLIP_BELOW_BITS, CLIP = 8, 0.9  # activations of fewer bits are clipped (QuaRot, section 4)
_FP8: dict[str, Granularity] = {"fp8": "tensor", "fp8_row": "row", "fp8_block": "block"}
MXFP4_GROUP = 32  # numbers that share a scale (OCP Microscaling Formats 1.0, section 5.3.3)
_SCALED_PARTS = ("qkv", "o", "gate_up", "down")


def grid_of(format: Precision) -> Grid | None:
    """The grid of an integer format; None for any other."""
    dense = _dense_name(format)
    if dense == "q8_0":
        return Grid(8, 32)
    simple = len(format.scales) == 1 and format.scales[0].rows == 1
    if not format.values.startswith("int") or not simple or not dense.startswith("int"):
        return None
    return Grid(format.width, format.scales[0].columns, symmetric="zero" not in dense)


class RoundingRecipe:
    """Round to nearest, in integers or fp8, which needs no calibration; other methods change parts of it."""

    method: QuantizationMethod = "rtn"
    calibrated = False
    moments = False  # whether calibration has to collect the inputs' second moments
    divides = True  # whether `linear` may get a part of the matrix that was prepared

    def __init__(self, kernels: Kernels, plan: PrecisionPlan, calibrator: Calibrator | None = None) -> None:
        if self.calibrated and calibrator is None:
            raise QuantizationError(
                f"method '{self.method}' needs calibration text, and this model has no tokenizer; "
                "give method 'rtn', or weights that come with one"
            )
        if problem := format_problem(plan, mxfp4=kernels.keeps_mxfp4):
            raise QuantizationError(problem)
        self.kernels = kernels
        self.plan = plan
        self.calibrator = calibrator
        self.layers = 0
        self.statistics: Statistics = {}

    def prepare(self, spec: ModelSpec, weights: Weights) -> Weights:
        self.layers = len(weights.layers)
        if self.calibrated:
            assert self.calibrator is not None
            self.statistics = self.calibrator.statistics(spec, weights, moments=self.moments)
        return weights

    def linear(self, name: str, weight: Tensor) -> Linear:
        format = self.format_of(name)
        if format.width >= 16:
            if format.sparse and weight.shape[1] % 16 == 0:  # that the kernels' indices take
                return KernelLinear(self.kernels, self.kernels.pack(weight, "sparse24"))
            if format.sparse:
                return EmulatedLinear(self.kernels, weight)
            return KernelLinear(self.kernels, self.kernels.pack(weight, "fp32" if format.width == 32 else "bf16"))
        clip = CLIP if self.plan.activations.width < CLIP_BELOW_BITS else 1.0
        rounded = rounding(self.plan.activations, clip)
        if format == PRECISIONS["mxfp4"]:
            linear: Linear = self._mxfp4(name, weight)
            return linear if rounded is None else ChangedInput(linear, rounded)
        grid = grid_of(format)
        quantized = to_fp8(weight, _FP8[_dense_name(format)]) if grid is None else self.on_grid(name, weight, grid)
        if rounded is None:
            return self._weight_only(quantized, format)
        return self._with_rounded_inputs(quantized, format) or ChangedInput(
            self._weight_only(quantized, format), rounded
        )

    def format_of(self, name: str) -> Precision:
        """The weight format of a matrix by its name, as the precision plan has it."""
        plan, path = self.plan, name.split(".")
        if path[0] == "layers" and plan.keeps(int(path[1]), self.layers):
            return plan.plain
        return plan.weights_of(_part(path))

    def _with_rounded_inputs(self, quantized: Quantized | Float8, format: Precision) -> Linear | None:
        """The linear of a kernel that rounds its inputs itself as the plan has them; None where there is none."""
        activations = self.plan.activations
        if isinstance(quantized, Quantized) and grid_of(format) == Grid(8) and activations == PRECISIONS["int8"]:
            return int8_linear(self.kernels, quantized)
        if format.sparse:
            return None
        if not isinstance(quantized, Quantized):
            return fp8_w8a8_linear(self.kernels, quantized, activations)
        return w4a8_linear(self.kernels, quantized) if activations.values == "int8" else None

    def _weight_only(self, quantized: Quantized | Float8, format: Precision) -> Linear:
        """The linear that multiplies inputs as they are."""
        if format.sparse:  # no kernel reads indices beside codes
            return EmulatedLinear(self.kernels, quantized.dequantized().to(torch.bfloat16))
        if isinstance(quantized, Quantized):
            return integer_linear(self.kernels, quantized)
        return fp8_linear(self.kernels, quantized)

    def _mxfp4(self, name: str, weight: Tensor) -> Linear:
        """A matrix of a checkpoint in MXFP4 comes out as it was there: its numbers are rounded to themselves."""
        if weight.shape[1] % MXFP4_GROUP:
            raise QuantizationError(
                f"{name} has rows of {weight.shape[1]}, and mxfp4 has a scale for each {MXFP4_GROUP} numbers; "
                "give another format"
            )
        return KernelLinear(self.kernels, self.kernels.pack(weight, "mxfp4"))

    def on_grid(self, name: str, weight: Tensor, grid: Grid) -> Quantized:
        """A matrix in integers."""
        return round_to_nearest(weight, grid)


class GptqRecipe(RoundingRecipe):
    """GPTQ; a matrix that saw no calibration token, as a rare expert, is rounded to nearest."""

    method = "gptq"
    calibrated = True
    moments = True
    divides = False

    def on_grid(self, name: str, weight: Tensor, grid: Grid) -> Quantized:
        inputs = self.statistics.get(name)
        if inputs is None:
            return round_to_nearest(weight, grid)
        return gptq(weight, inputs.moments, grid, keep_zeros=self.plan.weights.sparse)


class AwqRecipe(RoundingRecipe):
    """AWQ, its scales folded into what comes before; where nothing can take them a matrix only has its ranges."""

    method = "awq"
    calibrated = True
    moments = True
    divides = False

    def prepare(self, spec: ModelSpec, weights: Weights) -> Weights:
        weights = super().prepare(spec, weights)
        grid = grid_of(self.plan.weights)
        assert grid is not None, "the technique refuses AWQ for what is no integer"
        layers = []
        scaled = dict(self.statistics)
        for index, (layer, tensors) in enumerate(zip(spec.stack, weights.layers, strict=False)):
            folder = Folder(layer, dict(tensors), weights.arithmetic.glu_limit is not None)
            for part in filter(folder.takes, _SCALED_PARTS):
                name = f"layers.{index}.{part}"
                if self.format_of(name).width >= 16:
                    continue
                inputs = self.statistics[name]
                magnitude = folder.shared(part, inputs.mean_abs)
                scales = search_scales(folder.tensors[part], inputs, grid, magnitude)
                folder.fold(part, scales)
                scaled[name] = inputs.scaled(1 / scales)
            layers.append(folder.tensors)
        self.statistics = scaled
        return replace(weights, layers=tuple(layers))

    def on_grid(self, name: str, weight: Tensor, grid: Grid) -> Quantized:
        inputs = self.statistics.get(name)
        return round_to_nearest(weight, grid) if inputs is None else round_clipped(weight, inputs, grid)


class SmoothQuantRecipe(RoundingRecipe):
    """SmoothQuant, its scales folded into what comes before; `alpha` is the paper's for most models."""

    method = "smoothquant"
    calibrated = True
    alpha = 0.5

    def prepare(self, spec: ModelSpec, weights: Weights) -> Weights:
        weights = super().prepare(spec, weights)
        layers = []
        for index, (layer, tensors) in enumerate(zip(spec.stack, weights.layers, strict=False)):
            folder = Folder(layer, dict(tensors), weights.arithmetic.glu_limit is not None)
            for part in filter(folder.takes, _SCALED_PARTS):
                name = f"layers.{index}.{part}"
                if self.format_of(name).width >= 16:
                    continue
                largest = folder.shared(part, self.statistics[name].max_abs)
                scales = smoothing_scales(folder.tensors[part], largest, self.alpha)
                folder.fold(part, folder.shared(part, scales))
            layers.append(folder.tensors)
        return replace(weights, layers=tuple(layers))


class OutlierRecipe(RoundingRecipe):
    """LLM.int8(): what stands out is multiplied in 16 bits, the rest in 8."""

    method = "llm_int8"
    calibrated = True
    divides = False

    def linear(self, name: str, weight: Tensor) -> Linear:
        inputs = self.statistics.get(name)
        if inputs is None or self.format_of(name).width >= 16:
            return super().linear(name, weight)
        split = split_outliers(weight, inputs.max_abs)
        regular = int8_linear(self.kernels, split.regular)
        if not len(split.columns):
            return regular
        few = KernelLinear(self.kernels, self.kernels.pack(split.outliers, "bf16"))
        return SplitLinear(regular, few, split.columns)


class QuarotRecipe(RoundingRecipe):
    """QuaRot: rotated, and rounded by GPTQ as in the paper; the inputs of `down` are rotated in each step.

    Without calibration text, as for random weights, it rounds to nearest.
    """

    method = "quarot"
    divides = False

    def prepare(self, spec: ModelSpec, weights: Weights) -> Weights:
        self._moments: dict[str, Tensor] = {}
        turned = rotated(spec, weights)
        if self.calibrator is not None and self.plan.weights.width < 16:
            seen = self.calibrator.statistics(spec, weights)
            self._moments = rotated_moments(spec, weights, {name: one.moments for name, one in seen.items()})
        return super().prepare(spec, turned)

    def on_grid(self, name: str, weight: Tensor, grid: Grid) -> Quantized:
        moments = self._moments.get(name)
        return round_to_nearest(weight, grid) if moments is None else gptq(weight, moments, grid)

    def linear(self, name: str, weight: Tensor) -> Linear:
        linear = super().linear(name, weight)
        if not name.endswith(".down"):
            return linear
        return ChangedInput(linear, Changed(rotation(weight.shape[1]).to(weight.device).apply))


class FoundRecipe(RoundingRecipe):
    """The blocks of a GGUF as they are; matrices in other types keep 16 bits."""

    method = "found"
    divides = False

    def __init__(self, kernels: Kernels, plan: PrecisionPlan, gguf: Path | None) -> None:
        if gguf is None:
            raise QuantizationError("method 'found' keeps the blocks of a GGUF; give one as field 'weights'")
        super().__init__(kernels, plan)
        self.gguf = gguf
        self.blocks: FoundBlocks | None = None

    def prepare(self, spec: ModelSpec, weights: Weights) -> Weights:
        self.blocks = FoundBlocks(self.kernels, self.gguf, spec)
        self.blocks.check(self.plan.weights)
        return super().prepare(spec, weights)

    def linear(self, name: str, weight: Tensor) -> Linear:
        assert self.blocks is not None, "prepare comes first"
        found = self.blocks.linear(name, weight)
        return found or KernelLinear(self.kernels, self.kernels.pack(weight, "bf16"))


QUANTIZERS: dict[QuantizationMethod, type[RoundingRecipe]] = {
    recipe.method: recipe
    for recipe in (RoundingRecipe, GptqRecipe, AwqRecipe, SmoothQuantRecipe, OutlierRecipe, QuarotRecipe)
}


def recipe_for(
    techniques: Sequence[Technique],
    plan: PrecisionPlan,
    kernels: Kernels,
    calibrator: Calibrator | None,
    *,
    divided: bool = False,
    gguf: Path | None = None,
) -> Recipe:
    """The recipe that techniques ask for, in the formats of their set-up's plan; raises QuantizationError.

    `divided` says that it gets parts of matrices, one on each device; `gguf` is the file that they come from.
    """
    quantizing = (technique for technique in techniques if isinstance(technique, WeightQuantization | W8A8))
    method: QuantizationMethod = next((technique.method for technique in quantizing), "rtn")
    if method == "found":
        recipe: RoundingRecipe = FoundRecipe(kernels, plan, gguf)
    elif plan.weights.name in GGML_BLOCKS | GGML_MIXES and plan.weights.name != "q8_0":
        raise QuantizationError(
            f"weights in {plan.weights.name} are measured as a GGUF has them: give method 'found' and such a file "
            "as field 'weights', or a format such as int4_g32"
        )
    else:
        recipe = QUANTIZERS[method](kernels, plan, calibrator)
    if divided and not recipe.divides:
        raise QuantizationError(
            f"method '{recipe.method}' needs whole matrices, and parallel.tp divides them; give method 'rtn', or tp 1"
        )
    pruning = next((technique for technique in techniques if isinstance(technique, Sparsity24)), None)
    if pruning is None:
        return recipe
    if recipe.method in ("quarot", "found"):
        raise QuantizationError(f"sparsity_2_4 and method '{recipe.method}' exclude each other; give one of them")
    return PruningRecipe(recipe, pruning.method, calibrator)


def format_problem(plan: PrecisionPlan, *, mxfp4: bool = False) -> str | None:
    """The first format of a plan's weights or activations that the runtime cannot make, in one sentence, or None.

    `mxfp4` says that the kernels multiply it.
    """
    for part in ("attention", "ffn", "experts", "shared_experts", "router", "lm_head"):
        format = plan.weights_of(part)
        known = grid_of(format) is not None or _dense_name(format) in {*_FP8, *GGML_BLOCKS, *GGML_MIXES}
        known = known or (mxfp4 and format == PRECISIONS["mxfp4"])
        if format.width < 16 and not known:
            return (
                f"weights in {format.name} is predicted, not measured yet: the runtime has integers of 2 to 8 bits "
                "such as int4_g64 and int8, fp8, fp8_row and fp8_block, and the blocks of a GGUF"
            )
    activations = plan.activations
    if activations.width < 16 and not (activations.values.startswith("int") or activations.values == "fp8"):
        return (
            f"activations in {activations.name} is predicted, not measured yet: the runtime has integers "
            "such as int8 and int4_row, and fp8"
        )
    return None


def _dense_name(format: Precision) -> str:
    return format.name.removesuffix("_sparse24")


def _part(path: Sequence[str]) -> str:
    """The part of a precision plan to which a matrix belongs."""
    if path[-1] in ("lm_head", "router"):
        return path[-1]
    if "experts" in path:
        return "experts"
    if "shared" in path:
        return "shared_experts"
    return "ffn" if path[-1] in ("gate_up", "down") else "attention"
