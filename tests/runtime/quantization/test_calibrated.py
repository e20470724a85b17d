"""GPTQ, AWQ, SmoothQuant and LLM.int8(): what each promises about a linear whose inputs are known."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from membound.runtime.quantization.awq import round_clipped, search_scales
from membound.runtime.quantization.gptq import gptq
from membound.runtime.quantization.outliers import split_outliers
from membound.runtime.quantization.quantized import Grid, QuantizationError
from membound.runtime.quantization.ranges import output_error, search_shrinks
from membound.runtime.quantization.rtn import round_per_token, round_to_nearest
from membound.runtime.quantization.smoothquant import smoothing_scales
from membound.runtime.quantization.statistics import Accumulator, InputStatistics
from membound.runtime.quantization.surgeon import inverse_factor

K = 128
GRIDS = [Grid(3), Grid(4, 64), Grid(3, 64, symmetric=False), Grid(4, 32, symmetric=False)]


def inputs(seed: int = 0, tokens: int = 512, k: int = K) -> Tensor:
    """Activations as language models have them: correlated, a few channels much larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, k, generator=generator) @ torch.randn(k, k, generator=generator) / k**0.5
    return mixed * torch.randn(k, generator=generator).exp()


def matrix(seed: int = 1, n: int = 48, k: int = K) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.02


def statistics(x: Tensor) -> InputStatistics:
    accumulator = Accumulator(x.shape[1], x.device)
    accumulator.add(x)
    return accumulator.statistics()


@given(st.lists(st.integers(1, 511), max_size=4), st.integers(0, 20))
@settings(max_examples=20)
def test_statistics_do_not_depend_on_the_pieces(cuts: list[int], seed: int) -> None:
    x = inputs(seed)
    accumulator = Accumulator(K, x.device)
    edges = [0, *sorted(set(cuts)), len(x)]
    for start, end in itertools.pairwise(edges):
        accumulator.add(x[start:end])
    pieces, whole = accumulator.statistics(), statistics(x)
    assert pieces.tokens == len(x)
    for name in ("mean_abs", "max_abs", "mean_square", "second_moments"):
        torch.testing.assert_close(getattr(pieces, name), getattr(whole, name), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole.moments, x.T @ x / len(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole.moments.diagonal(), whole.mean_square, rtol=1e-4, atol=1e-5)


def test_the_output_error_is_that_of_the_outputs() -> None:
    x, difference = inputs(), matrix()
    assert output_error(difference, statistics(x).moments) == pytest.approx(
        float((x @ difference.T).square().sum(1).mean()), rel=1e-4
    )


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("act_order", [True, False])
def test_gptq_loses_less_output_than_rounding_to_nearest(grid: Grid, act_order: bool) -> None:
    w, moments = matrix(), statistics(inputs()).moments
    nearest = output_error(w - round_to_nearest(w, grid).dequantized(), moments)
    assert output_error(w - gptq(w, moments, grid, act_order=act_order).dequantized(), moments) < 0.75 * nearest


@pytest.mark.parametrize("grid", GRIDS)
def test_with_independent_inputs_gptq_rounds_to_nearest(grid: Grid) -> None:
    w = matrix()
    nearest = round_to_nearest(w, grid, search_shrinks(w, torch.eye(K), grid))
    for act_order in (True, False):
        assert torch.equal(gptq(w, torch.eye(K), grid, act_order=act_order).codes, nearest.codes)


def test_gptq_keeps_zeros_where_it_is_told_to() -> None:
    w = matrix()
    w[:, ::2] = 0
    moments = statistics(inputs()).moments
    kept = gptq(w, moments, Grid(4, 64), keep_zeros=True).dequantized()
    assert (kept[:, ::2] == 0).all() and (kept[:, 1::2] != 0).any()
    assert (gptq(w, moments, Grid(4, 64)).dequantized()[:, ::2] != 0).any()


def test_a_channel_that_is_never_used_does_not_disturb_gptq() -> None:
    x = inputs()
    x[:, 5] = 0
    moments = statistics(x).moments
    result = gptq(matrix(), moments, Grid(4, 64))
    assert torch.isfinite(result.dequantized()).all()


@given(st.integers(2, 40), st.integers(0, 30))
@settings(max_examples=20)
def test_the_factor_is_that_of_the_inverse(k: int, seed: int) -> None:
    moments = statistics(inputs(seed, tokens=k // 2, k=k)).moments  # singular: fewer tokens than channels
    factor = inverse_factor(moments, damping=0.1)
    damped = moments + 0.1 * moments.diagonal().mean() * torch.eye(k)
    torch.testing.assert_close(factor.T @ factor @ damped, torch.eye(k), rtol=0, atol=2e-3)
    assert torch.equal(factor, factor.triu())


@pytest.mark.parametrize("grid", GRIDS)
def test_awq_loses_less_output_than_rounding_to_nearest(grid: Grid) -> None:
    w, seen = matrix(), statistics(inputs())
    nearest = output_error(w - round_to_nearest(w, grid).dequantized(), seen.moments)
    scales = search_scales(w, seen, grid)
    scaled_and_clipped = round_clipped(w * scales, seen.scaled(1 / scales), grid).dequantized() / scales
    assert output_error(w - scaled_and_clipped, seen.moments) < 0.9 * nearest
    only_scaled = round_to_nearest(w * scales, grid).dequantized() / scales
    assert output_error(w - only_scaled, seen.moments) <= nearest  # scales of 1 are among those that are tried


def test_channels_of_equal_size_need_no_scales() -> None:
    assert torch.allclose(search_scales(matrix(), statistics(torch.eye(K) * 3), Grid(3)), torch.ones(K))


def test_a_clipped_group_loses_no_more_of_its_own_output() -> None:
    w, seen = matrix(), statistics(inputs())
    grid = Grid(3, 64)
    nearest, clipped = round_to_nearest(w, grid), round_clipped(w, seen, grid)
    for group in range(K // 64):
        columns = slice(64 * group, 64 * group + 64)
        moments = seen.moments[columns, columns]
        before = output_error((w - nearest.dequantized())[:, columns], moments)
        assert output_error((w - clipped.dequantized())[:, columns], moments) <= before * (1 + 1e-5)


@given(st.floats(0, 1), st.integers(0, 30))
@settings(max_examples=20)
def test_smoothing_changes_no_output(alpha: float, seed: int) -> None:
    x, w = inputs(seed), matrix(seed)
    scales = smoothing_scales(w, x.abs().amax(0), alpha)
    torch.testing.assert_close((x / scales) @ (w * scales).T, x @ w.T, rtol=1e-3, atol=1e-4)


def test_at_one_half_inputs_and_weights_are_equally_hard() -> None:
    x, w = inputs(), matrix()
    scales = smoothing_scales(w, x.abs().amax(0), 0.5)
    torch.testing.assert_close((x / scales).abs().amax(0), (w * scales).abs().amax(0), rtol=1e-4, atol=0)


def test_smoothing_helps_where_channels_stand_out() -> None:
    x, w = inputs(), matrix()
    x[:, 7] *= 50
    scales = smoothing_scales(w, x.abs().amax(0), 0.5)

    def error(inputs: Tensor, weight: Tensor) -> float:
        rounded = round_per_token(inputs, 8) @ round_to_nearest(weight, Grid(8)).dequantized().T
        return float((rounded - x @ w.T).norm())

    assert error(x / scales, w * scales) < 0.5 * error(x, w)


def test_outliers_stay_as_they_were() -> None:
    x, w = inputs(), matrix()
    x[:, [3, 90]] += 20
    split = split_outliers(w, x.abs().amax(0), threshold=19)
    assert {3, 90} <= set(split.columns.tolist())
    torch.testing.assert_close(split.dequantized()[:, 3], w[:, 3], rtol=2**-8, atol=0)
    assert (split.regular.dequantized()[:, [3, 90]] == 0).all()
    assert not len(split_outliers(w, x.abs().amax(0), threshold=1e6).columns)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: smoothing_scales(matrix(), torch.ones(K), 1.5), "alpha is 1.5"),
        (lambda: split_outliers(matrix(), torch.ones(K), 0), "threshold is 0"),
        (lambda: inverse_factor(torch.eye(4), 0), "damping is 0"),
        (lambda: inverse_factor(torch.full((4, 4), float("nan"))), "not finite"),
        (lambda: Accumulator(4, torch.device("cpu")).statistics(), "no token"),
        (lambda: InputStatistics(1, *[torch.ones(4)] * 3).moments, "no second moments"),
    ],
)
def test_what_cannot_be_calibrated_is_one_sentence(make, says: str) -> None:
    with pytest.raises(QuantizationError, match=says):
        make()
