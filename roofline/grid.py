"""How long do decode steps take, over a whole grid of batches and contexts and for each set-up?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from membound.roofline.cost import pipelined_cost
from membound.roofline.models import ModelSpec
from membound.roofline.shape import StepShape
from membound.roofline.techniques import EngineSetup
from membound.roofline.times.operator import Times


def decode_grid(
    model: ModelSpec, setups: Sequence[EngineSetup], times: Times, batches: ArrayLike, contexts: ArrayLike
) -> NDArray[np.float64]:
    """Seconds of decode steps [setups, batches, contexts], each of `batch` sequences of `context` tokens.

    What depends on the batch alone, as all linears do, is worked out once for each batch. `times` are those of one
    device and profile; set-ups with another profile ask for a grid of their own.
    """
    batch = np.asarray(batches, dtype=np.float64)[:, None]
    context = np.asarray(contexts, dtype=np.float64)[None, :]
    shape = StepShape.decode(batch, context)
    seconds = np.empty((len(setups), batch.size, context.size))
    for index, setup in enumerate(setups):
        seconds[index] = pipelined_cost(model, setup, times, shape).time_s
    return seconds
