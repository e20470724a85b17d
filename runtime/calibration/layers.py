"""What do a mixture of experts and a recurrent state cost beside their linears?

Measured on the runtime's own layers with linears that return at once: the routing, gathering and adding of experts, and
the update of a Mamba-2 state, which stands for the kinds that the kernels compute alone. Of RWKV's layers torch
computes so much, operation by operation, that they are measured themselves, the interpreter's time included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from membound.kernels.base import Kernels, PackedWeight, RaggedBatch
from membound.roofline.hardware.calibration import recurrence_of
from membound.roofline.models import ModelSpec, get_model
from membound.roofline.models.recurrent import Mamba2
from membound.runtime.arithmetic import Routing
from membound.runtime.blocks.base import LayerCache, ShiftedFeedForward
from membound.runtime.blocks.build import BlockBuilder
from membound.runtime.blocks.ffn import TwoLayers
from membound.runtime.blocks.mamba import Mamba2Mixer
from membound.runtime.blocks.moe import MixtureNetwork
from membound.runtime.calibration.operators import Load, ragged_batch
from membound.runtime.calibration.stopwatch import Stopwatch
from membound.runtime.linear import KernelLinear, Linear
from membound.runtime.loading.weights import random_weights

# Models in whose shapes one layer is measured, by what a calibration calls it.
WHOLE_LAYERS = {
    recurrence_of("rwkv6"): ("RWKV-6-1.6B", "RWKV-6-3B"),
    recurrence_of("rwkv7"): ("RWKV-7-0.4B", "RWKV-7-1.5B"),
}
LAYER_KINDS = ("moe", "recurrent", *WHOLE_LAYERS)
TINY_VOCAB = 64
SAMPLES = 8
NARROW = 16
EPS = 1e-5


@dataclass(frozen=True)
class LayerGrid:
    """The sizes to measure, and the seconds to spend on each."""

    tokens: tuple[int, ...] = (1, 4, 16, 64, 256)
    hidden: tuple[int, ...] = (512, 2048)
    experts: tuple[tuple[int, int], ...] = ((8, 2), (64, 6))  # of which a token takes the second
    states: tuple[Mamba2, ...] = (
        Mamba2(heads=16, head_dim=64, d_state=64),
        Mamba2(heads=24, head_dim=64, d_state=128),
    )
    loads: tuple[Load, ...] = (Load(1, 64), Load(4, 64), Load(16, 64), Load(1, 64, 64), Load(1, 256, 256))
    whole_layers: int = 2  # models of each of `WHOLE_LAYERS`
    cell_s: float = 4e-3


class LayerProbe:
    """Measures the layers of a grid; a pass takes each size once."""

    def __init__(self, kernels: Kernels, stopwatch: Stopwatch, grid: LayerGrid) -> None:
        self.kernels = kernels
        self.stopwatch = stopwatch
        self.grid = grid
        self.device = stopwatch.device

    def amounts(self, kind: str) -> list[dict[str, float]]:
        """What each measured size of a kind comes to, in the terms of its cost (`calibrated_times`)."""
        if kind == "moe":
            return [
                {"experts": float(network.touched), "elements": float(tokens * top_k)}
                for tokens, _, top_k, network in self._mixtures()
            ]
        states = [model.attention for model in self._models(kind)] if kind in WHOLE_LAYERS else self.grid.states
        return [
            {
                "elements": float(load.sequences * load.new),
                "sequences": float(load.sequences),
                "kv_bytes": 2.0 * 4 * load.sequences * (state.state_elements + state.conv_elements),
                "flops": 5.0 * state.state_elements * load.sequences * load.new,
            }
            for state in states
            for load in self.grid.loads
        ]

    def measure(self, kind: str) -> Iterator[float]:
        """Seconds of one layer without its linears at each size, in the order of `amounts`."""
        if kind == "moe":
            for tokens, hidden, _, network in self._mixtures():
                yield self._time_s(network, self._ones(tokens, hidden))
        elif kind in WHOLE_LAYERS:
            for model in self._models(kind):
                yield from self._layer_s(model)
        else:
            for state in self.grid.states:
                for load in self.grid.loads:
                    yield self._state_s(state, load)

    def _models(self, kind: str) -> list[ModelSpec]:
        found = (get_model(name) for name in WHOLE_LAYERS[kind][: self.grid.whole_layers])
        return [model.model_copy(update={"layers": 1, "vocab": TINY_VOCAB}) for model in found]

    def _layer_s(self, spec: ModelSpec) -> Iterator[float]:
        """Seconds of a layer's parts without its norms, for each load."""
        weights = random_weights(spec, seed=0).to(self.device)

        def given(name: str, matrix: Tensor) -> Linear:
            return _Called(self.kernels, matrix)

        builder = BlockBuilder(spec, weights.arithmetic, self.kernels, given, self.device)
        block = builder.build(0, spec.stack[0], weights.layers[0])
        mixer, network = block.mixer, block.ffn
        assert mixer is not None and isinstance(network, ShiftedFeedForward), "RWKV has both"
        for load in self.grid.loads:
            cache, batch = mixer.new_cache(1, 16, load.sequences), ragged_batch(load, self.device)

            def both(x: Tensor, batch: RaggedBatch = batch, cache: LayerCache = cache) -> Tensor:
                return network.shifted(mixer(x, batch, cache), batch, cache)

            yield self._time_s(both, self._ones(load.sequences * load.new, spec.hidden))

    def _mixtures(self) -> Iterator[tuple[int, int, int, _Mixture]]:
        """Tokens, hidden elements, top_k and a mixture that chooses at random."""
        for count, top_k in self.grid.experts:
            for hidden in self.grid.hidden:
                for tokens in self.grid.tokens:
                    generator = torch.Generator().manual_seed(tokens)
                    logits = torch.randn(tokens, count, generator=generator).to(self.device)
                    yield tokens, hidden, top_k, _Mixture(logits, top_k, hidden, self.kernels, self.device)

    def _state_s(self, spec: Mamba2, load: Load) -> float:
        tokens, rows = load.sequences * load.new, spec.linears(spec.d_inner)[0].n
        into = _Given(self._ones(tokens, rows))
        weights = {
            "conv": torch.ones(spec.conv_channels, spec.conv_width, device=self.device),
            "conv_bias": torch.zeros(spec.conv_channels, device=self.device),
            "gated_norm": torch.ones(spec.d_inner, device=self.device),
            **{name: -torch.ones(spec.heads, device=self.device) for name in ("a", "d", "dt_bias")},
        }
        out = _Given(self._ones(tokens, 64))
        mixer = Mamba2Mixer(spec, self.kernels, into, out, weights, EPS, self.device)
        cache, batch = mixer.new_cache(1, 16, load.sequences), ragged_batch(load, self.device)
        return self._time_s(lambda x: mixer(x, batch, cache), self._ones(tokens, 64))

    def _time_s(self, layer: object, x: Tensor) -> float:
        with torch.inference_mode():
            return self.stopwatch.time_s([layer] * SAMPLES, lambda: self.kernels.scaled(x, 1.0), self.grid.cell_s)  # type: ignore[list-item]

    def _ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=self.kernels.activation_dtype, device=self.device)


class _Given:
    """A linear layer that returns what it was given."""

    emulated = False
    whole_step = False
    nbytes = 0

    def __init__(self, y: Tensor) -> None:
        self.y = y
        self.shape = (y.shape[1], 1)

    def __call__(self, x: Tensor) -> Tensor:
        return self.y


class _Called:
    """A linear layer that multiplies a few rows of its input, as long as a call takes, and returns zeros."""

    emulated = False
    whole_step = False
    nbytes = 0

    def __init__(self, kernels: Kernels, matrix: Tensor) -> None:
        self.shape = (matrix.shape[0], matrix.shape[1])
        self._kernels = kernels
        self._few = kernels.pack(matrix[:NARROW], "bf16")
        self._results: dict[int, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        y = self._kernels.linear(x, self._few)
        if len(x) not in self._results:
            self._results[len(x)] = y.new_zeros(len(x), self.shape[0])
        return self._results[len(x)]


class _SameExpert:
    """An expert that returns its input; where the kernels multiply experts together, one of NARROW rows."""

    def __init__(self, kernels: Kernels, into: PackedWeight, out: PackedWeight) -> None:
        self.layers = TwoLayers(KernelLinear(kernels, into), lambda rows: rows, KernelLinear(kernels, out))

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def linears(self) -> Iterator[tuple[str, KernelLinear]]:
        return iter(())


class _Mixture(MixtureNetwork):
    """A mixture whose router returns `logits` and whose experts compute nothing that takes time."""

    def __init__(self, logits: Tensor, top_k: int, hidden: int, kernels: Kernels, device: torch.device) -> None:
        shapes = (NARROW, hidden), (hidden, NARROW)
        into, out = (kernels.pack(torch.zeros(shape, device=device), "bf16") for shape in shapes)
        experts = [_SameExpert(kernels, into, out) for _ in range(logits.shape[1])]
        super().__init__(Routing(), top_k, _Given(logits), experts, kernels=kernels, device=device)
        self.touched = len(logits.topk(top_k).indices.unique())
