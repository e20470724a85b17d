"""How do a model's weights become the linear layers of a decoder?"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from membound.kernels.base import Kernels, WeightFormat
from membound.roofline.models import ModelSpec
from membound.runtime.linear import KernelLinear, Linear
from membound.runtime.loading.weights import Weights


class Recipe(Protocol):
    """What is done to a model's weights before and while its decoder is built.

    A matrix is named by its layer and its part: `layers.3.qkv`, `layers.3.experts.7.down`, `lm_head`. The parts are
    those of `roofline.models`.
    """

    def prepare(self, spec: ModelSpec, weights: Weights) -> Weights:
        """The weights after what concerns several of them at once: a rotation, a scale folded into a norm."""

    def linear(self, name: str, weight: Tensor) -> Linear:
        """The linear layer of a matrix [n, k]."""


class FormatRecipe:
    """Every matrix in one format of the kernels."""

    def __init__(self, kernels: Kernels, format: WeightFormat) -> None:
        self.kernels = kernels
        self.format = format

    def prepare(self, spec: ModelSpec, weights: Weights) -> Weights:
        return weights

    def linear(self, name: str, weight: Tensor) -> Linear:
        return KernelLinear(self.kernels, self.kernels.pack(weight, self.format))
