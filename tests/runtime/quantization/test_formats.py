"""fp8, rotations and pruning: exactness where it is promised, bounds where it is not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from membound.kernels.reference import TorchKernels
from membound.roofline.techniques import engine_setup
from membound.runtime.quantization.fp8 import LARGEST, round_fp8_per_tensor, round_fp8_per_token, to_fp8
from membound.runtime.quantization.hadamard import rotation
from membound.runtime.quantization.magnitude import prune_by_magnitude
from membound.runtime.quantization.quantized import QuantizationError
from membound.runtime.quantization.recipes import QuarotRecipe, RoundingRecipe
from membound.runtime.quantization.sparsegpt import sparsegpt
from membound.runtime.quantization.sparsity import Pruned
from membound.runtime.quantization.wanda import wanda


def matrix(n: int = 48, k: int = 128, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
def test_fp8_is_within_a_sixteenth_of_what_is_large_enough(granularity) -> None:
    w = matrix(200, 300)
    result = to_fp8(w, granularity)
    values = result.dequantized()
    assert result.codes.float().abs().max() == LARGEST == 448
    # e4m3 has 3 bits behind the point: normal values are off by 1/16 at most, smaller ones by half the least step
    step = result.scale.max() * 2**-9
    assert ((values - w).abs() <= torch.maximum(w.abs() / 16, step / 2) * 1.001).all()
    assert result.scale.shape == {"tensor": (1, 1), "row": (200, 1), "block": (2, 3)}[granularity]


def test_finer_scales_are_nearer_where_rows_differ() -> None:
    w = matrix(256, 256) * torch.logspace(-6, 0, 256)[:, None]
    errors = [float(((to_fp8(w, g).dequantized() - w) / w).abs().mean()) for g in ("tensor", "block", "row")]
    assert errors[0] > errors[1] > errors[2]


def test_activations_in_fp8() -> None:
    x = matrix(4, 200)
    together = round_fp8_per_token(x)
    assert torch.equal(together[1:2], round_fp8_per_token(x[1:2]))
    assert ((together - x).abs() <= x.abs() / 16 + 1e-3).all()
    assert round_fp8_per_token(x, 128).shape == x.shape
    assert torch.equal(round_fp8_per_tensor(together * 0), together * 0)


SIZES = (1, 2, 4, 12, 20, 28, 36, 64, 96, 576, 896, 1536, 5, 9, 90)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [None, 3])
def test_rotations_are_orthogonal(size: int, seed: int | None) -> None:
    turn = rotation(size, seed)
    matrix = turn.apply(torch.eye(size))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), rtol=0, atol=1e-5)
    if size % 4 == 0:
        torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, size**-0.5), rtol=0, atol=1e-5)


@given(st.integers(1, 400))
@settings(max_examples=30)
def test_a_rotation_keeps_lengths(size: int) -> None:
    x = matrix(3, size)
    torch.testing.assert_close(rotation(size, 1).apply(x).norm(dim=1), x.norm(dim=1), rtol=1e-4, atol=1e-4)


def test_an_outlier_is_spread_over_all_channels() -> None:
    x = torch.zeros(1, 1536)
    x[0, 77] = 100
    assert rotation(1536).apply(x).abs().max() == pytest.approx(100 / 1536**0.5, rel=1e-4)


class CopiesBetweenDevices(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.device] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        devices = {each.device for each in (*args, out) if isinstance(each, torch.Tensor) and each.dim()}
        self.found += [] if len(devices) < 2 else list(devices)
        return out


def test_the_rotation_of_a_step_lies_where_its_matrix_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph can capture no copy from the host; the meta device stands for the GPU."""
    monkeypatch.setattr(RoundingRecipe, "linear", lambda self, name, weight: weight)
    recipe = QuarotRecipe(TorchKernels(), engine_setup(()).precision)
    turned = recipe.linear("layers.0.down", torch.empty(8, 96, device="meta"))
    x = torch.empty(3, 96, device="meta")
    with CopiesBetweenDevices() as copies:
        rotation(96).apply(x)
    assert copies.found
    with CopiesBetweenDevices() as copies:
        assert turned.change.apply(x).shape == x.shape
    assert not copies.found


def test_what_cannot_be_rotated_is_one_sentence() -> None:
    with pytest.raises(QuantizationError, match="size is 0"):
        rotation(0)
    with pytest.raises(QuantizationError, match="1031 of them are left over"):
        rotation(2 * 1031)


METHODS = {
    "magnitude": lambda w, x, s, p: prune_by_magnitude(w, s, p),
    "wanda": lambda w, x, s, p: wanda(w, x.square().mean(0), s, p),
    "sparsegpt": lambda w, x, s, p: sparsegpt(w, x.T @ x / len(x), s, p),
}


def activations(k: int = 128) -> torch.Tensor:
    mixed = matrix(512, k, 2) @ matrix(k, k, 3) / k**0.5
    return mixed * matrix(1, k, 4).exp()


@pytest.mark.parametrize("method", METHODS)
@given(sparsity=st.floats(0, 0.95), seed=st.integers(0, 5))
@settings(max_examples=10)
def test_as_many_weights_go_as_were_asked_for(method: str, sparsity: float, seed: int) -> None:
    w = matrix(seed=seed)
    pruned = METHODS[method](w, activations(), sparsity, "unstructured")
    assert pruned.kept.float().mean().item() == pytest.approx(1 - sparsity, abs=0.01)
    assert (pruned.weight[~pruned.kept] == 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_two_of_four_stay(method: str) -> None:
    pruned: Pruned = METHODS[method](matrix(), activations(), 0.5, "2:4")
    assert (pruned.kept.unflatten(1, (-1, 4)).sum(-1) == 2).all()
    assert (pruned.weight[~pruned.kept] == 0).all()


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
def test_looking_at_inputs_loses_less_output(pattern) -> None:
    w, x = matrix(), activations()
    errors = [
        float((x @ (METHODS[method](w, x, 0.5, pattern).weight - w).T).norm())
        for method in ("magnitude", "wanda", "sparsegpt")
    ]
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
def test_with_independent_inputs_sparsegpt_is_magnitude_pruning(pattern) -> None:
    w = matrix()
    by_size = prune_by_magnitude(w, 0.5, pattern)
    pruned = sparsegpt(w, torch.eye(128), 0.5, pattern)
    assert torch.equal(pruned.kept, by_size.kept) and torch.equal(pruned.weight, by_size.weight)


def test_with_equal_inputs_wanda_prunes_each_row_by_magnitude() -> None:
    w = matrix()
    pruned = wanda(w, torch.full((128,), 4.0))
    assert (pruned.kept.sum(1) == 64).all()
    for row, kept in zip(w.abs(), pruned.kept, strict=True):
        assert row[kept].min() >= row[~kept].max()


@pytest.mark.parametrize("method", METHODS)
def test_impossible_sparsity_is_one_sentence(method: str) -> None:
    for sparsity, pattern, k in ((1.0, "unstructured", 128), (0.6, "2:4", 128), (0.5, "2:4", 126)):
        with pytest.raises(QuantizationError, match="sparsity"):
            METHODS[method](matrix(k=k), activations(k), sparsity, pattern)
