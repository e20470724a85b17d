"""Which stage of a pipeline do the others wait for, and how much longer is its turn?

Engines give each stage as many layers, the first ones one more where they do not divide, and the last stage the
matrix of the vocabulary beside its own (vLLM's `get_pp_indices`, TensorRT-LLM's `Mapping.pp_layers`, from memory). In
16 bits beside layers in 4 that matrix is as much as four or five layers, of which eight stages have ten.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from membound.roofline.parallel import Parallelism
from membound.roofline.shape import Count
from membound.roofline.times.operator import HasTotal

# Operators of the first stage alone, of the last alone, and of none: what passes between stages, and the host's work.
_FIRST, _LAST, _BETWEEN = ("embed", "first_norm"), ("lm_head", "gather_logits"), ("next_stage", "host")


def slowest_stage(
    costs: Sequence[HasTotal], layers: int, parallel: Parallelism, micro_batches: Count
) -> list[Count] | None:
    """How often each operator of a pass of a micro-batch counts where all stages are busy, of `costs` in their order.

    A micro-batch then moves on with the slowest stage, so that a round of all takes as many of its turns as there are
    stages: its layers count for those of the others, and the vocabulary's matrix once for each of them, or not at all
    where another stage is slower. Where stages are idle nobody waits for the slowest, and all count once. None without
    stages.
    """
    pp = parallel.pp
    if pp == 1:
        return None
    full = np.where(np.asarray(micro_batches) >= pp, 1.0, 0.0)[()]
    least, more = divmod(layers, pp)
    in_layers_s = sum(_seconds(cost) for cost in costs if cost.operator.name not in (*_FIRST, *_LAST, *_BETWEEN))
    last_s = sum(_seconds(cost) for cost in costs if cost.operator.name in _LAST)
    last_is_slowest = not more or last_s > in_layers_s / layers
    stage_layers = least + (0 if last_is_slowest else 1)
    weights: list[Count] = []
    for cost in costs:
        name = cost.operator.name
        if name in _BETWEEN or name in _FIRST:
            weights.append(1.0)
        elif name in _LAST:
            weights.append(1.0 + full * (pp - 1.0 if last_is_slowest else -1.0))
        else:
            weights.append(1.0 + full * (pp * stage_layers / layers - 1.0))
    return weights


def _seconds(cost: HasTotal) -> float:
    return float(np.mean(cost.total_s))
