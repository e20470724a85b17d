"""How are the inputs of a model's linears observed while it reads calibration text?"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from membound.kernels.base import Kernels
from membound.roofline.models import ModelSpec
from membound.runtime.decoder import Decoder
from membound.runtime.linear import Linear, WrappedLinear
from membound.runtime.loading.weights import Weights
from membound.runtime.plain import BLOCK_SIZE, single_sequence
from membound.runtime.quality.texts import calibration_windows
from membound.runtime.quantization.quantized import QuantizationError
from membound.runtime.quantization.statistics import Accumulator, InputStatistics
from membound.runtime.recipe import FormatRecipe, Recipe
from membound.runtime.tokenizer import Tokenizer

CALIBRATION_TOKENS = 8192
MOMENTS_SHARE = 0.5  # of a machine's memory

Statistics = dict[str, InputStatistics]  # by the matrix's name


class ObservedLinear(WrappedLinear):
    """A linear that adds its inputs to an accumulator before it multiplies them."""

    def __init__(self, inner: Linear, accumulator: Accumulator) -> None:
        super().__init__(inner)
        self.accumulator = accumulator

    def __call__(self, x: Tensor) -> Tensor:
        self.accumulator.add(x)
        return self.inner(x)


class ObservingRecipe:
    """Another recipe's decoder, with the inputs of every matrix but the lm_head observed in `accumulators`."""

    def __init__(self, inner: Recipe, *, moments: bool = True) -> None:
        self.inner = inner
        self.moments = moments
        self.accumulators: dict[str, Accumulator] = {}

    def prepare(self, spec: ModelSpec, weights: Weights) -> Weights:
        return self.inner.prepare(spec, weights)

    def linear(self, name: str, weight: Tensor) -> Linear:
        linear = self.inner.linear(name, weight)
        if name == "lm_head":
            return linear
        self.accumulators[name] = Accumulator(linear.shape[1], weight.device, moments=self.moments)
        return ObservedLinear(linear, self.accumulators[name])


def collect_statistics(
    spec: ModelSpec, weights: Weights, kernels: Kernels, token_ids: Sequence[Sequence[int]], *, moments: bool = True
) -> Statistics:
    """What each linear's inputs look like while the model in bf16 reads `token_ids`, one window after the other.

    Memory is that of the second moments, k x k for each matrix, however much is read. A matrix that saw no token, as an
    expert that is never chosen, has no entry. Raises QuantizationError where the moments do not fit.
    """
    if not token_ids:
        raise QuantizationError("there is no calibration text; give at least one window of tokens")
    if moments:
        _check_memory(spec, weights)
    recipe = ObservingRecipe(FormatRecipe(kernels, "bf16"), moments=moments)
    decoder = Decoder(spec, weights, kernels, recipe)
    for window in token_ids:
        blocks = -(-len(window) // BLOCK_SIZE)
        batch = single_sequence(0, len(window), blocks, decoder.device)
        ids = torch.tensor(window, device=decoder.device)
        decoder.hidden(ids, batch, decoder.new_cache(blocks, BLOCK_SIZE))
    sums = recipe.accumulators
    return {name: sums.pop(name).statistics() for name in [*sums] if sums[name].tokens}  # one by one: they are large


def _check_memory(spec: ModelSpec, weights: Weights) -> None:
    """Second moments are kept for all matrices at once: 4 bytes for each pair of columns."""
    shapes = (tensor.shape for layer in weights.layers for tensor in layer.values() if tensor.dim() == 2)
    needed = 4 * sum(shape[1] ** 2 for shape in shapes)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * MOMENTS_SHARE
    if weights.embed.device.type == "cuda":
        memory = torch.cuda.mem_get_info(weights.embed.device)[0]
    if needed > memory:
        raise QuantizationError(
            f"the second moments of {spec.name} take {needed / 2**30:.1f} GiB, more than the {memory / 2**30:.1f} GiB "
            "that may be taken for them; "
            "give a method without them: rtn, smoothquant, llm_int8, magnitude or wanda"
        )


class Calibrator:
    """Collects the statistics of weights on one text, and keeps those of the weights it saw last."""

    def __init__(self, kernels: Kernels, token_ids: Sequence[Sequence[int]]) -> None:
        self.kernels = kernels
        self.token_ids = token_ids
        self._of: weakref.ref[Weights] | None = None
        self._statistics: Statistics = {}
        self._moments = False

    @classmethod
    def on_text(cls, kernels: Kernels, tokenizer: Tokenizer) -> Calibrator:
        """Calibrates on English and code that come with Python."""
        return cls(kernels, calibration_windows(tokenizer, CALIBRATION_TOKENS))

    def statistics(self, spec: ModelSpec, weights: Weights, *, moments: bool = True) -> Statistics:
        """Those of the model in bf16, with second `moments` or without; collected once for the same weights."""
        if self._of is None or self._of() is not weights or (moments and not self._moments):
            self._statistics = {}
            self._statistics = collect_statistics(spec, weights, self.kernels, self.token_ids, moments=moments)
            self._of, self._moments = weakref.ref(weights), moments
        return self._statistics
