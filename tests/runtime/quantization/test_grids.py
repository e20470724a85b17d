"""Rounding to nearest: no value moves further than half a step, and finer grids are nearer."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from membound.runtime.quantization.quantized import Grid, QuantizationError, spread
from membound.runtime.quantization.rtn import round_per_token, round_to_nearest

GRIDS = st.builds(Grid, bits=st.integers(2, 8), group=st.sampled_from((0, 32, 64, 128)), symmetric=st.booleans())


def weight(n: int, k: int, seed: int) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05


@given(GRIDS, st.integers(1, 7), st.integers(1, 200), st.integers(0, 99))
@settings(max_examples=60)
def test_no_value_moves_further_than_half_a_step(grid: Grid, n: int, k: int, seed: int) -> None:
    w = weight(n, k, seed)
    quantized = round_to_nearest(w, grid)
    low, high = grid.limits
    assert low <= int(quantized.codes.min()) and int(quantized.codes.max()) <= high
    steps = spread(quantized.scale, quantized.group, k)
    # scales in fp16 may be a two-thousandth too short for the largest code, and the zero point is a whole number
    slack = 0.5 + (2**grid.bits) / 2048 + (0.5 if not grid.symmetric else 0)
    assert ((quantized.dequantized() - w).abs() <= slack * steps + 1e-7).all()


@given(GRIDS, st.integers(0, 99))
@settings(max_examples=30)
def test_what_lies_on_the_grid_stays_there(grid: Grid, seed: int) -> None:
    first = round_to_nearest(weight(3, 128, seed), grid)
    offset = None if first.offset is None else spread(first.offset, first.group, 128)
    again = grid.round(first.dequantized(), spread(first.scale, first.group, 128), offset)
    assert torch.equal(again, first.codes.float())


@pytest.mark.parametrize("symmetric", [True, False])
def test_more_bits_and_smaller_groups_are_nearer(symmetric: bool) -> None:
    w = weight(64, 512, 0)
    errors = [float((round_to_nearest(w, Grid(b, 64, symmetric)).dequantized() - w).norm()) for b in range(2, 9)]
    assert errors == sorted(errors, reverse=True) and errors[0] > 50 * errors[-1]
    by_group = [float((round_to_nearest(w, Grid(4, g, symmetric)).dequantized() - w).norm()) for g in (0, 128, 64, 32)]
    assert by_group == sorted(by_group, reverse=True)


def test_each_bit_halves_the_error() -> None:
    """6 dB a bit, for values that are spread evenly (Widrow and Kollar, Quantization noise, 2008)."""
    w = torch.rand(64, 4096, generator=torch.Generator().manual_seed(0)) - 0.5
    errors = [float((round_to_nearest(w, Grid(b, 0, False)).dequantized() - w).norm()) for b in range(3, 8)]
    for before, after in itertools.pairwise(errors):
        assert before / after == pytest.approx(2, rel=0.15)


def test_zero_is_on_every_grid() -> None:
    w = weight(4, 64, 1).abs() + 1  # nowhere near 0
    w[:, ::2] = 0
    for symmetric in (True, False):
        assert (round_to_nearest(w, Grid(4, 32, symmetric)).dequantized()[:, ::2] == 0).all()
    assert (round_to_nearest(torch.zeros(2, 32), Grid(4, 32)).dequantized() == 0).all()


def test_groups_become_smaller_where_they_do_not_divide_a_row() -> None:
    assert Grid(4, 128).columns(576) == 64  # SmolLM2-135M: 4.5 groups of 128
    assert Grid(4, 128).columns(1536) == 128
    assert Grid(4, 128).columns(50) == 50
    assert round_to_nearest(weight(2, 70, 0), Grid(4, 32)).scale.shape == (2, 3)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Grid(1), "bits is 1"),
        (lambda: Grid(4, -1), "group is -1"),
        (lambda: round_to_nearest(torch.tensor([[1.0, float("nan")]]), Grid(4)), "not finite"),
        (lambda: round_to_nearest(torch.ones(3), Grid(4)), "two dimensions"),
    ],
)
def test_what_cannot_be_rounded_is_one_sentence(make, says: str) -> None:
    with pytest.raises(QuantizationError, match=says):
        make()


@given(st.integers(2, 8), st.integers(0, 50))
@settings(max_examples=30)
def test_a_token_is_rounded_by_itself(bits: int, seed: int) -> None:
    x = weight(5, 96, seed)
    together = round_per_token(x, bits)
    assert torch.equal(together[2:3], round_per_token(x[2:3], bits))
    assert torch.equal(round_per_token(x * 4, bits), together * 4)
    step = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((together - x).abs() <= 0.5001 * step).all()
