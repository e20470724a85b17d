"""Which weights of a model go before another recipe takes those that stay?"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from membound.roofline.models import ModelSpec
from membound.roofline.techniques.weights import PruningMethod
from membound.runtime.linear import Linear
from membound.runtime.loading.weights import Weights
from membound.runtime.quantization.calibration import Calibrator, Statistics
from membound.runtime.quantization.magnitude import prune_by_magnitude
from membound.runtime.quantization.quantized import QuantizationError
from membound.runtime.quantization.sparsegpt import sparsegpt
from membound.runtime.quantization.sparsity import Pattern, Pruned
from membound.runtime.quantization.statistics import InputStatistics
from membound.runtime.quantization.wanda import wanda
from membound.runtime.recipe import Recipe

_PRUNED_PARTS = ("qkv", "o", "gate_up", "down", "q_a", "q_b", "kv_a", "kv_b")


class PruningRecipe:
    """Prunes every matrix of the layers before another recipe takes them; routers stay whole."""

    def __init__(
        self,
        inner: Recipe,
        method: PruningMethod,
        calibrator: Calibrator | None,
        pattern: Pattern = "2:4",
    ) -> None:
        if method != "magnitude" and calibrator is None:
            raise QuantizationError(
                f"method '{method}' needs calibration text, and this model has no tokenizer; give method 'magnitude'"
            )
        self.inner = inner
        self.method = method
        self.calibrator = calibrator
        self.pattern = pattern

    def prepare(self, spec: ModelSpec, weights: Weights) -> Weights:
        statistics: Statistics = {}
        if self.method != "magnitude" and self.calibrator is not None:
            statistics = self.calibrator.statistics(spec, weights, moments=self.method == "sparsegpt")
        layers = []
        for index, tensors in enumerate(weights.layers):
            pruned = dict(tensors)
            for part, tensor in tensors.items():
                if tensor.dim() == 2 and part.rsplit(".", 1)[-1] in _PRUNED_PARTS:
                    kept = self._pruned(tensor, statistics.get(f"layers.{index}.{part}"))
                    pruned[part] = kept.weight.to(tensor.dtype)
            layers.append(pruned)
        return self.inner.prepare(spec, replace(weights, layers=tuple(layers)))

    def linear(self, name: str, weight: Tensor) -> Linear:
        return self.inner.linear(name, weight)

    def _pruned(self, weight: Tensor, inputs: InputStatistics | None) -> Pruned:
        if self.method == "magnitude" or inputs is None:
            return prune_by_magnitude(weight, pattern=self.pattern)
        if self.method == "wanda":
            return wanda(weight, inputs.mean_square, pattern=self.pattern)
        return sparsegpt(weight, inputs.moments, pattern=self.pattern)
