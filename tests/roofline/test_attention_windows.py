"""Which query-key pairs does a layer with a window compute, and which tokens does it read?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membound.roofline.cost import step_cost
from membound.roofline.hardware import get_hardware
from membound.roofline.models import get_model
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import EngineSetup, KvEviction, engine_setup
from membound.roofline.times.known import times_for
from membound.roofline.windows import windows_of


def counted(new: int, cached: int, window: int) -> int:
    """Pairs one by one: the i-th new token sees itself and what came before, at most `window` tokens."""
    return sum(min(cached + i, window) for i in range(1, new + 1))


@given(sequences=st.integers(1, 5), new=st.integers(1, 300), cached=st.integers(0, 300), window=st.integers(1, 400))
@settings(max_examples=200)
def test_pairs_under_a_window_are_those_that_are_counted(sequences, new, cached, window):
    chunk = StepShape.prefill(float(sequences), float(new), float(cached)).prefill_part.windowed(window)
    assert chunk.attended == pytest.approx(sequences * counted(new, cached, window), rel=1e-9)
    verify = StepShape.verify(float(sequences), float(new + cached), float(new - 1)).decode_part.windowed(window)
    assert verify.attended == pytest.approx(sequences * counted(new, cached, window), rel=1e-9)


@given(new=st.integers(1, 10_000), window=st.integers(1, 10_000))
def test_a_prompt_longer_than_the_window_has_a_triangle_and_a_band(new, window):
    pairs = StepShape.prefill(1.0, float(new)).prefill_part.windowed(window).attended
    whole = new * (new + 1) / 2
    assert pairs == pytest.approx(new * window - window * (window - 1) / 2 if new > window else whole)


def test_windows_of_many_steps_at_once_are_those_of_each():
    new, cached = np.array([1.0, 40.0, 700.0, 700.0]), np.array([5.0, 0.0, 0.0, 900.0])
    together = StepShape.prefill(np.ones(4), new, cached).prefill_part.windowed(256).attended
    assert together == pytest.approx([counted(int(q), int(p), 256) for q, p in zip(new, cached, strict=True)])


# (cached tokens, new tokens, rows of logits) of sequences that decode a token each, and of whole prompts or chunks.
DECODING = st.lists(st.tuples(st.integers(0, 5000), st.just(1), st.just(1)), min_size=1, max_size=6)
CHUNKS = st.lists(st.tuples(st.integers(0, 3000), st.integers(34, 3000), st.sampled_from([0, 1])), max_size=3)
WINDOWS = st.integers(1, 6000)


@given(decoding=DECODING, prompts=CHUNKS, window=WINDOWS)
def test_uneven_sequences_see_what_each_of_them_sees(decoding, prompts, window):
    shape = StepShape.of([*decoding, *prompts], (window,))
    decode, chunks = shape.decode_within(window), shape.prefill_within(window)
    assert decode.kv_tokens == decode.attended == sum(min(cached + 1, window) for cached, _, _ in decoding)
    assert chunks.kv_tokens == sum(min(cached + new, window + new - 1) for cached, new, _ in prompts)
    assert chunks.attended == pytest.approx(sum(counted(new, cached, window) for cached, new, _ in prompts), rel=1e-12)


@given(decoding=DECODING, prompts=CHUNKS)
def test_a_window_that_none_fills_is_none(decoding, prompts):
    shape = StepShape.of([*decoding, *prompts], (6000,))
    np.testing.assert_allclose(shape.decode_within(6000), shape.decode_part, rtol=1e-12)
    np.testing.assert_allclose(shape.prefill_within(6000), shape.prefill_part, rtol=1e-12)


@given(one=DECODING, other=DECODING, prompts=CHUNKS, window=WINDOWS)
def test_two_batches_in_one_step_see_what_both_see(one, other, prompts, window):
    together = StepShape.of([*one, *other, *prompts], (window,))
    assert StepShape.of(one, (window,)) + StepShape.of([*other, *prompts], (window,)) == together
    # of one of them nobody said it
    mixed = StepShape.of(one) + StepShape.of([*other, *prompts], (window,))
    apart = (
        StepShape.of(one).decode_part.windowed(window).kv_tokens + StepShape.of(other, (window,)).seen_within(window)[1]
    )
    assert mixed.decode_within(window).kv_tokens == pytest.approx(apart)


@given(context=st.integers(1, 5000), count=st.integers(1, 40), guesses=st.integers(0, 8), window=WINDOWS)
def test_equal_sequences_see_what_they_were_taken_to_see(context, count, guesses, window):
    shape = StepShape.of([(context - 1, 1, 1)] * count, (window,)).with_guesses(float(guesses))
    unsaid = StepShape.decode(float(count), float(context)).with_guesses(float(guesses))
    np.testing.assert_allclose(shape.decode_within(window), unsaid.decode_part.windowed(window), rtol=1e-9)
    as_prompts = shape.as_prompts().prefill_within(window)
    np.testing.assert_allclose(as_prompts, unsaid.as_prompts().prefill_part.windowed(window), rtol=1e-9)


@given(decoding=DECODING, prompts=CHUNKS, window=WINDOWS, parts=st.integers(1, 4))
def test_a_part_of_a_batch_sees_its_part(decoding, prompts, window, parts):
    shape = StepShape.of([*decoding, *prompts] * parts, (window,))
    share = shape.divided(float(parts)).seen_within(window)
    np.testing.assert_allclose(share, StepShape.of([*decoding, *prompts], (window,)).seen_within(window), rtol=1e-9)
    assert shape.on_one_of(1) == shape


CASES = [
    ("gemma-2-9b", EngineSetup()),
    ("gpt-oss-20b", EngineSetup()),
    ("Llama-3.1-8B", engine_setup((KvEviction(policy="streaming", budget=512),))),
    ("gemma-3-4b", engine_setup((KvEviction(policy="quest", budget=512),))),
    ("DeepSeek-V3.2", EngineSetup()),
]


def kv_bytes(model: str, setup: EngineSetup, shape: StepShape) -> float:
    operators = step_operators(get_model(model), setup, shape)
    return sum(float(op.kv_bytes) * op.calls for op in operators if op.kind == "attention")


@pytest.mark.parametrize(("model", "setup"), CASES)
@settings(deadline=None, max_examples=30)
@given(decoding=DECODING)
def test_a_step_reads_the_cache_of_each_of_its_sequences(model, setup, decoding):
    windows = windows_of(get_model(model), setup)
    apart = sum(kv_bytes(model, setup, StepShape.of([part], windows)) for part in decoding)
    assert kv_bytes(model, setup, StepShape.of(decoding, windows)) == pytest.approx(apart, rel=1e-12)


@pytest.mark.parametrize(("model", "setup"), CASES)
@settings(deadline=None, max_examples=30)
@given(decoding=DECODING, which=st.integers(0, 5), longer=st.integers(1, 3000))
def test_a_step_takes_no_less_where_one_sequence_is_longer(model, setup, decoding, which, longer):
    spec, times = get_model(model), times_for(get_hardware("H100-SXM5"), "graphs")
    windows = windows_of(spec, setup)

    def seconds(parts: list[tuple[int, int, int]]) -> float:
        return float(step_cost(spec, setup, times, StepShape.of(parts, windows)).time_s)

    cached, new, rows = decoding[which % len(decoding)]
    grown = [*decoding]
    grown[which % len(decoding)] = (cached + longer, new, rows)
    assert seconds(grown) >= seconds(decoding) * (1 - 1e-12)


@pytest.mark.parametrize(("model", "setup"), CASES)
def test_a_short_sequence_beside_long_ones_does_not_pay_a_window(model, setup):
    windows = windows_of(get_model(model), setup)
    uneven = [(7, 1, 1)] * 8 + [(7991, 1, 1)] * 8
    even = StepShape.decode(16.0, 4000.0)
    assert kv_bytes(model, setup, StepShape.of(uneven, windows)) < kv_bytes(model, setup, even)
