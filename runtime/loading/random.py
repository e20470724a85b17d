"""What stands in for weights where there are none?"""

from __future__ import annotations

import torch
from torch import Tensor

from membound.kernels.arena import Arena
from membound.roofline.models import ModelSpec
from membound.roofline.models.layers import Layer
from membound.runtime.arithmetic import Arithmetic
from membound.runtime.loading.shapes import extra_shapes, matrix_shapes, vector_shapes
from membound.runtime.loading.store import LayerWeights, Weights
from membound.runtime.supported import checked

_POOL_ELEMENTS = 4_194_301  # prime, so that rows of no length line up with the period of the pool


def random_weights(
    spec: ModelSpec, seed: int, layers: int | None = None, arithmetic: Arithmetic | None = None
) -> Weights:
    """Seeded weights in the true shapes of `spec`: right for timing, and logits stay finite, but they mean nothing.

    Values are normal with variance 1 / k, drawn from one pool of 4 million that repeats. `layers` makes fewer
    layers than `spec` has, the first ones, for a model that does not fit.
    """
    arithmetic = arithmetic or Arithmetic.typical(checked(spec))
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(_POOL_ELEMENTS, generator=generator).bfloat16()
    arena = Arena()

    def matrix(n: int, k: int) -> Tensor:
        flat = arena.empty((n * k,), torch.bfloat16)
        shift = int(torch.randint(_POOL_ELEMENTS, (), generator=generator))
        scaled = pool.roll(shift) * k**-0.5
        for piece in flat.split(_POOL_ELEMENTS):
            piece.copy_(scaled[: piece.numel()])
        return flat.view(n, k)

    def vector(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm") or name == "d":
            return torch.ones(shape)
        noise = torch.randn(shape, generator=generator)
        if name == "a":
            return -noise.abs() - 0.5  # a rate of decay
        if name == "conv":
            return noise * shape[-1] ** -0.5
        return 0.1 * noise if name.endswith(("bias", "positions", "sinks")) else noise.sigmoid()

    def layer_weights(layer: Layer) -> LayerWeights:
        tensors = {name: vector(name, shape) for name, shape in vector_shapes(spec, layer, arithmetic).items()}
        return tensors | {name: matrix(n, k) for name, (n, k) in matrix_shapes(layer, spec.hidden).items()}

    stack = spec.stack if layers is None else spec.stack[:layers]
    embed = matrix(spec.vocab, spec.hidden)
    return Weights(
        embed=embed,
        layers=tuple(map(layer_weights, stack)),
        final_norm=torch.ones(spec.hidden),
        lm_head=embed if spec.tie_embeddings else matrix(spec.vocab, spec.hidden),
        origin=f"random weights in the shapes of {spec.name}, seed {seed}, {len(stack)} of {spec.layers} layers",
        arithmetic=arithmetic,
        extras={name: vector(name, shape) for name, shape in extra_shapes(spec).items()},
    )
