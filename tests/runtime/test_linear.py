"""A linear layer around another one says of it what the other one does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from membound.kernels.reference import TorchKernels
from membound.runtime.linear import BiasedLinear, Linear
from membound.runtime.parallel.recipe import GatheredLinear, ReducedLinear
from membound.runtime.quantization.calibration import ObservedLinear
from membound.runtime.quantization.linears import Changed, ChangedInput, SplitLinear

KERNELS = TorchKernels()
GROUP = SimpleNamespace(size=2)


def given(whole_step: bool) -> Linear:
    return SimpleNamespace(shape=(8, 4), nbytes=64, emulated=False, whole_step=whole_step)  # type: ignore[return-value]


AROUND = {
    "bias": lambda inner: BiasedLinear(KERNELS, inner, torch.zeros(8)),
    "observed": lambda inner: ObservedLinear(inner, None),
    "changed": lambda inner: ChangedInput(inner, Changed(lambda x: x)),
    "split": lambda inner: SplitLinear(inner, given(False), torch.zeros(1)),
    "gathered": lambda inner: GatheredLinear(inner, GROUP),
    "reduced": lambda inner: ReducedLinear(inner, GROUP),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("whole_step", [False, True])
def test_a_scale_of_the_whole_step_is_seen_through_what_stands_around_it(around: str, whole_step: bool) -> None:
    assert AROUND[around](given(whole_step)).whole_step == whole_step
