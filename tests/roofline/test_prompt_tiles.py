"""Prompts of one step are computed each in its own tiles, whatever the length of the others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from membound.roofline.cost import step_cost
from membound.roofline.hardware import get_hardware
from membound.roofline.models import get_model
from membound.roofline.shape import StepShape
from membound.roofline.techniques import EngineSetup
from membound.roofline.tiles import QUERY_TILE, Tiles, tiles_of
from membound.roofline.times.efficiency import prefill_attention_s
from membound.roofline.times.kernel_fits import published_fits
from membound.roofline.times.known import times_for

# (cached tokens, new tokens, rows of logits) of whole prompts or chunks of them.
PROMPTS = st.lists(st.tuples(st.integers(0, 3000), st.integers(34, 4000), st.just(1)), min_size=2, max_size=5)
WINDOW = st.integers(1, 5000)
MODELS = {"Llama-3.1-8B": (), "gpt-oss-20b": (128,)}  # with their windows
FIT = published_fits()["prefill_attention", "bf16", "H100-SXM5", "any"].parameters


def of_one(part: tuple[int, int, int], window: int | None) -> Tiles:
    """By the formula of equal prompts, of which it is the only one."""
    alone = StepShape.of([part], () if window is None else (window,))
    assert not alone.tiles
    return alone.tiles_within(window)


@given(prompts=PROMPTS, window=WINDOW)
def test_the_tiles_of_prompts_are_the_sum_of_those_of_each(prompts, window):
    shape = StepShape.of(prompts, (window,))
    for seen in (None, window):
        each = [of_one(part, seen) for part in prompts]
        expected = [sum(float(amount) for amount in column) for column in list(zip(*each, strict=True))[1:]]
        np.testing.assert_allclose(shape.tiles_within(seen)[1:], expected, rtol=1e-12)


@given(prompts=PROMPTS, window=WINDOW)
def test_two_steps_prompts_in_one_have_the_tiles_of_both(prompts, window):
    shape = StepShape.of(prompts, (window,))
    joined = StepShape.of(prompts[:1], (window,)) + StepShape.of(prompts[1:], (window,))
    for seen in (None, window):
        np.testing.assert_allclose(joined.tiles_within(seen)[1:], shape.tiles_within(seen)[1:], rtol=1e-12)


@given(cached=st.integers(0, 3000), new=st.integers(34, 4000), count=st.integers(2, 6), window=WINDOW)
def test_equal_prompts_have_the_tiles_that_they_had(cached, new, count, window):
    shape = StepShape.of([(cached, new, 1)] * count, (window,))
    plain = StepShape.prefill(float(count), float(new), float(cached))
    assert shape.tiles and not plain.tiles
    for seen in (None, window):
        np.testing.assert_allclose(shape.tiles_within(seen)[1:], plain.tiles_within(seen)[1:], rtol=1e-9)


@given(prompts=PROMPTS, window=WINDOW)
def test_equal_prompts_stand_in_whose_tiles_have_as_many_pairs(prompts, window):
    tokens, count = sum(new for _, new, _ in prompts), len(prompts)
    for tiles in tiles_of(prompts, (window,)):
        equal = Tiles.of_equal(None, tokens, count, tiles.as_equal(tokens, count))
        assert equal.pairs == pytest.approx(tiles.pairs, rel=1e-9)


def kernel_s(shape: StepShape) -> float:
    """Seconds of attention that computes, on a device without launches and with tiles for all units."""
    parameters = {**FIT, "launch_s": 0.0, "wave_loss": 0.0}
    part, tiles = shape.prefill_part, shape.tiles_within(None) if shape.tiles else None
    amounts = part.tokens, part.sequences, part.attended, 512.0, 0.0
    return float(prefill_attention_s(parameters, get_hardware("H100-SXM5"), 5e14, 32.0, *amounts, tiles)[0])


@given(prompts=PROMPTS)
def test_a_kernel_takes_as_long_for_prompts_together_as_for_each(prompts):
    assert kernel_s(StepShape.of(prompts)) == pytest.approx(sum(kernel_s(StepShape.of([one])) for one in prompts))


def test_padding_of_short_prompts_is_not_that_of_long_ones():
    """Four prompts of ten tokens beside one of two thousand: as five of four hundred they took a fifth longer."""
    prompts = [(0, 10, 1)] * 4 + [(0, 2000, 1)]
    tiled = StepShape.of(prompts)
    unsaid = StepShape(*tiled.sums[:-1])
    assert kernel_s(unsaid) > 1.1 * kernel_s(tiled)


@settings(deadline=None, max_examples=30)
@given(prompts=PROMPTS, which=st.integers(0, 4), longer=st.integers(1, 20), model=st.sampled_from(sorted(MODELS)))
def test_attention_takes_no_less_where_one_prompt_is_longer(prompts, which, longer, model):
    """By whole tiles where layers have a window, since rows that fill a tile up count as if they saw beyond it."""
    assume(which < len(prompts))
    longer *= QUERY_TILE if MODELS[model] else 1
    spec, times = get_model(model), times_for(get_hardware("H100-SXM5"), "graphs")

    def seconds(parts: list[tuple[int, int, int]]) -> float:
        cost = step_cost(spec, EngineSetup(), times, StepShape.of(parts, MODELS[model]))
        return sum(float(one.total_s) for one in cost.operators if one.operator.kind == "attention")

    grown = [*prompts]
    cached, new, rows = prompts[which]
    grown[which] = (cached, new + longer, rows)
    assert seconds(grown) >= seconds(prompts) * (1 - 1e-12)
