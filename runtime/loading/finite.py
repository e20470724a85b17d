"""Are all weights of a file numbers?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from membound.runtime.loading.store import Weights, WeightsError


def check_finite(weights: Weights) -> None:
    """Raises WeightsError that names the first tensor with a NaN or an infinity, of which every token would be one."""
    for name, tensor in _named(weights):
        # A sum is one pass, and finite unless an element is not, or the sum is too large: then every element counts.
        if tensor.sum(dtype=torch.float32).isfinite():
            continue
        wrong = int(tensor.numel() - tensor.isfinite().sum())
        if wrong:
            raise WeightsError(
                f"tensor {name} of {weights.origin} holds {wrong} of {tensor.numel()} values that are NaN or "
                "infinite; the file is damaged, or its numbers are too large for bf16: get or convert it again"
            )


def _named(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    yield "embed", weights.embed
    for index, layer in enumerate(weights.layers):
        for part, tensor in layer.items():
            yield f"layers.{index}.{part}", tensor
    yield "final_norm", weights.final_norm
    if weights.lm_head is not weights.embed:
        yield "lm_head", weights.lm_head
    yield from weights.extras.items()
