"""Tabulated step times are those of the roofline."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from membound.roofline.hardware import get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.parallel import Parallelism
from membound.roofline.shape import StepShape, shape_sums
from membound.roofline.techniques import (
    BatchOverlap,
    DraftModelSpeculation,
    Eagle,
    EngineSetup,
    KvBudget,
    NgramSpeculation,
    engine_setup,
)
from membound.roofline.times.known import times_for
from membound.simulator.step_times import StepTimes

CASES = [
    ("Llama-3.1-8B", "H100-SXM5", "graphs"),
    ("Qwen3-0.6B", "H100-SXM5", "eager"),
    ("DeepSeek-V3", "H200-SXM", "graphs"),
    ("gemma-3-12b", "L40S", "graphs"),
]


def step_times(model: str, hardware: str, profile: str) -> StepTimes:
    times = times_for(get_hardware(hardware), profile)
    return StepTimes(resolve_model(model), EngineSetup(profile=profile), times, 256, 4096)


def exact(times: StepTimes, sums: tuple[float, ...]) -> float:
    # As an array: a step without logits then has no lm_head to read.
    return float(times.exact(StepShape(*sums).filled(2))[0])


def sums_of(times: StepTimes, parts: list[tuple[int, int, int]]) -> tuple:
    return StepShape.of(parts, times.windows).sums


@pytest.mark.parametrize(("model", "hardware", "profile"), CASES)
def test_steps_of_decode_are_within_a_thousandth_and_so_are_mixed_steps_in_the_mean(model, hardware, profile):
    times, rng = step_times(model, hardware, profile), random.Random(1)
    errors = []
    for _ in range(150):
        decoding = [(rng.randrange(1, 8000), 1, 1) for _ in range(rng.choice([0, 1, 5, 30, 64, 200]))]
        if decoding:
            sums = sums_of(times, decoding)
            assert times.seconds(sums) == pytest.approx(exact(times, sums), rel=1e-3)
        prompts, left = [], 4000 - len(decoding)
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            tokens = min(left, rng.randrange(34, 1500))
            if tokens > 33:
                prompts.append((rng.choice([0, 0, 0, 512, 2048]), tokens, rng.choice([0, 1])))
                left -= tokens
        sums = sums_of(times, decoding + prompts)
        errors.append(abs(times.seconds(sums) / exact(times, sums) - 1))
    assert np.mean(errors) < 1e-3
    assert max(errors) < 0.01, "prompts of different lengths in one step count as equal ones with as many pairs"


SPECULATING = {
    "n-gram": (NgramSpeculation(gamma=4), {}),
    "a tree of guesses": (Eagle(depth=4, tree_size=20), {}),
    "as many as pay": (Eagle(depth=5, tree_size=5, adaptive=True), {}),
    "in stages": (NgramSpeculation(gamma=4), {"parallel": Parallelism(pp=2)}),
}


@pytest.mark.parametrize("name", SPECULATING)
def test_steps_with_guesses_are_those_of_the_roofline(name):
    technique, changes = SPECULATING[name]
    setup = replace(engine_setup((technique,)), **changes)
    times = StepTimes(resolve_model("Llama-3.1-8B"), setup, times_for(get_hardware("H100-SXM5"), "graphs"), 64, 4096)
    rng, gamma = random.Random(3), setup.drafts.gamma
    for _ in range(60):
        parts = []
        for _ in range(rng.choice([1, 2, 7, 33, 64])):
            new = 1 + rng.randrange(gamma + 1)
            parts.append((rng.randrange(1, 6000), new, new))
        n, guesses = len(parts), sum(new - 1 for _, new, _ in parts)
        known = float(sum(cached + 1 for cached, _, _ in parts))
        plain, mean = StepShape(float(n), float(n), known, known, float(n)), guesses / n
        verified = mean * setup.drafts.nodes / gamma if setup.drafts.nodes else mean
        expected = float(times.exact(plain.with_guesses(verified)))
        if guesses:
            expected += times.guesses.draft_s(plain, mean)
            assert times.guesses.seconds(n, known, guesses) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("name", [*SPECULATING, "a draft model", "a launch-bound engine"])
def test_steps_with_guesses_beside_prompts_are_within_three_thousandths_in_the_mean(name):
    """As steps with prompts are without guesses; the drafter also reads what it has left unread before."""
    others = {
        "a draft model": (DraftModelSpeculation(gamma=3, draft="Llama-3.2-1B"), {}),
        "a launch-bound engine": (Eagle(depth=4, tree_size=4), {"profile": "eager"}),
    }
    technique, changes = (SPECULATING | others)[name]
    setup = replace(engine_setup((technique,)), **changes)
    clock = times_for(get_hardware("H100-SXM5"), setup.profile)
    times = StepTimes(resolve_model("Llama-3.1-8B"), setup, clock, 64, 4096)
    rng, gamma, errors = random.Random(5), setup.drafts.gamma, []
    for _ in range(60):
        n = rng.choice([1, 2, 7, 33, 60])
        guesses, known = rng.randrange(1, n * gamma + 1), float(sum(rng.randrange(1, 6000) for _ in range(n)))
        prompts = StepShape(*shape_sums([(rng.choice([0, 0, 512]), rng.randrange(34, 1500), 1)]))
        unread = prompts.as_prompts() if rng.random() < 0.3 else None
        plain, mean = StepShape(float(n), float(n), known, known, float(n)), guesses / n
        verified = plain.with_guesses(mean * setup.drafts.nodes / gamma if setup.drafts.nodes else mean)
        read = plain + prompts.as_prompts() + (unread or StepShape(*shape_sums([])))
        expected = float(times.exact(verified + prompts)) + times.guesses.draft_s(read, mean)
        errors.append(abs(times.guesses.seconds(n, known, guesses, prompts, unread) / expected - 1))
    assert np.mean(errors) < 3e-3 and max(errors) < 0.025


@pytest.mark.parametrize("name", SPECULATING)
def test_the_end_of_a_prompt_is_no_guess_however_short(name):
    """A turn of few tokens behind a cached conversation costs what it costs beside as many guesses of a longer one."""
    technique, changes = SPECULATING[name]
    setup = replace(engine_setup((technique,)), **changes)
    times = StepTimes(resolve_model("Llama-3.1-8B"), setup, times_for(get_hardware("H100-SXM5"), "graphs"), 64, 4096)
    n, gamma = 8, setup.drafts.gamma
    plain = StepShape(*shape_sums([], n, n * 1000))
    for tokens in (2, 30, 33):
        turn = shape_sums([(3000, tokens, 1)])
        alone = times.seconds(tuple(a + b for a, b in zip(shape_sums([], n, n * 1000), turn, strict=True)))
        assert alone == pytest.approx(float(times.exact(plain + StepShape(*turn))), rel=1e-9), "nobody guesses"
        for guesses in (1, n * gamma):
            chunk = times.guesses.seconds(n, n * 1000, guesses, StepShape(*turn))
            longer = times.guesses.seconds(n, n * 1000, guesses, StepShape(*shape_sums([(3000, 34, 1)])))
            without = times.guesses.seconds(n, n * 1000, guesses)
            assert without <= chunk <= longer * 1.02


DIVIDED = {
    "four stages": ("Llama-3.1-70B", {"parallel": Parallelism(tp=2, pp=4)}),
    "stages one after the other": ("Llama-3.1-70B", {"parallel": Parallelism(tp=2, pp=4, micro_batches=1)}),
    "more micro-batches than stages": ("Llama-3.1-70B", {"parallel": Parallelism(pp=2, micro_batches=8)}),
    "a shared context": ("Llama-3.1-70B", {"parallel": Parallelism(tp=2, cp=4)}),
    "experts in columns": ("DeepSeek-V3", {"parallel": Parallelism(tp=2, dp=4, ep=1)}),
    "skewed experts": ("DeepSeek-V3", {"parallel": Parallelism(dp=8, ep=8), "expert_skew": 0.5}),
    "balanced experts": (
        "DeepSeek-V3",
        {"parallel": Parallelism(dp=8, ep=8), "expert_skew": 0.5, "redundant_experts": 32},
    ),
    "two halves": ("DeepSeek-V3", {"parallel": Parallelism(dp=8, ep=8), "overlap": BatchOverlap(8, 64, 20)}),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_steps_of_a_divided_model_are_those_of_the_roofline(name):
    model, setup = DIVIDED[name]
    clock = times_for(get_hardware("H100-SXM5"), "graphs")
    times = StepTimes(resolve_model(model), EngineSetup(**setup), clock, 256, 4096)
    rng, errors = random.Random(2), []
    for _ in range(60):
        decoding = [(rng.randrange(1, 8000), 1, 1) for _ in range(rng.choice([0, 1, 3, 8, 64, 200]))]
        if decoding:
            sums = shape_sums(decoding)
            assert times.seconds(sums) == pytest.approx(exact(times, sums), rel=2e-3)
        prompts = [(rng.choice([0, 512]), rng.randrange(34, 1500), 1) for _ in range(rng.choice([1, 1, 2]))]
        if "stages" in name:
            prompts = prompts[:1] * len(prompts)  # unequal ones are the mean one, which here is all
        sums = shape_sums(decoding + prompts)
        errors.append(abs(times.seconds(sums) / exact(times, sums) - 1))
    assert np.mean(errors) < 5e-3 and max(errors) < 0.03


@pytest.mark.parametrize(("model", "hardware", "profile"), CASES)
def test_equal_steps_in_closed_form_are_the_sum_of_the_steps(model, hardware, profile):
    times = step_times(model, hardware, profile)
    for sequences, kv_tokens in ((1, 37), (7, 5000), (64, 64 * 700), (200, 200 * 3000)):
        first_s, slope_s, alike = times.decode(sequences, kv_tokens)
        assert alike >= 1
        for step in (0, alike // 2, alike - 1):
            assert times.decode(sequences, kv_tokens + step * sequences)[0] == pytest.approx(
                first_s + step * slope_s, rel=1e-12
            )


WINDOWED = {
    "a window": ("gemma-2-9b", {}, "graphs"),
    "a short window": ("gpt-oss-20b", {}, "graphs"),
    "a launch-bound engine": ("gemma-3-4b", {}, "eager"),
    "a budget": ("Llama-3.1-8B", {"kv_budget": KvBudget("streaming", 512, sinks=4)}, "graphs"),
    "a budget and a window": ("gemma-3-4b", {"kv_budget": KvBudget("quest", 2048, page=16)}, "graphs"),
    "chosen tokens": ("DeepSeek-V3.2", {"parallel": Parallelism(tp=8)}, "graphs"),
    "stages": ("gemma-2-9b", {"parallel": Parallelism(pp=2)}, "graphs"),
    "a shared context": ("gemma-2-9b", {"parallel": Parallelism(tp=2, cp=2)}, "graphs"),
    "ranks": ("gpt-oss-20b", {"parallel": Parallelism(dp=2, ep=2)}, "graphs"),
    "two halves": ("gpt-oss-20b", {"parallel": Parallelism(dp=2, ep=2), "overlap": BatchOverlap(8, 64, 20)}, "graphs"),
}


def windowed_times(name: str) -> StepTimes:
    model, setup, profile = WINDOWED[name]
    clock = times_for(get_hardware("H100-SXM5"), profile)
    return StepTimes(resolve_model(model), EngineSetup(profile=profile, **setup), clock, 256, 4096)


@pytest.mark.parametrize("name", WINDOWED)
def test_steps_of_uneven_sequences_are_those_of_the_roofline_where_layers_have_windows(name):
    times, rng, errors = windowed_times(name), random.Random(7), []
    for _ in range(60):
        longest = rng.choice([100, 1000, 20000])
        decoding = [(rng.randrange(1, longest), 1, 1) for _ in range(rng.choice([0, 1, 5, 30, 64, 200]))]
        if decoding:
            sums = sums_of(times, decoding)
            assert times.seconds(sums) == pytest.approx(float(times.exact(StepShape(*sums))), rel=2e-3)
        prompts = [(rng.choice([0, 0, 512]), rng.randrange(34, 1500), 1) for _ in range(rng.choice([1, 1, 2, 3]))]
        if name == "stages":
            prompts = prompts[:1]
        sums = sums_of(times, decoding + prompts)
        errors.append(abs(times.seconds(sums) / float(times.exact(StepShape(*sums))) - 1))
    assert np.mean(errors) < 5e-3 and max(errors) < 0.03


@pytest.mark.parametrize("name", WINDOWED)
def test_equal_steps_in_closed_form_are_the_sum_of_the_steps_where_layers_have_windows(name):
    times = windowed_times(name)
    for contexts in ([37], [5, 200, 3000, 3990, 4095], [60 + 90 * n for n in range(64)]):
        seen = [sum(min(context, window) for context in contexts) for window in times.windows]
        growing = [sum(context < window for context in contexts) for window in times.windows]
        n, kv_tokens = len(contexts), sum(contexts)
        first_s, slope_s, alike = times.decode_within(n, kv_tokens, seen, growing)
        assert alike >= 1
        for step in (0, alike // 2, alike - 1):
            later = [tokens + step * more for tokens, more in zip(seen, growing, strict=True)]
            found_s = times.decode_within(n, kv_tokens + step * n, later, growing)[0]
            assert found_s == pytest.approx(first_s + step * slope_s, rel=1e-12)


@pytest.mark.parametrize("name", WINDOWED)
def test_equal_sequences_take_what_they_took_where_layers_have_windows(name):
    times = windowed_times(name)
    for n, context in ((1, 60), (16, 700), (64, 5000)):
        sums = sums_of(times, [(context - 1, 1, 1)] * n)
        assert times.seconds(sums) == pytest.approx(times.seconds(sums[:-1]), rel=1e-9)
        assert times.seconds(sums) == pytest.approx(float(times.exact(StepShape.decode(n, context))), rel=2e-3)


@pytest.mark.parametrize("profile", ["graphs", "eager"])
def test_guesses_of_uneven_sequences_are_those_of_the_roofline_where_layers_have_windows(profile):
    setup = replace(engine_setup((NgramSpeculation(gamma=4),)), profile=profile)
    times = StepTimes(resolve_model("gpt-oss-20b"), setup, times_for(get_hardware("H100-SXM5"), profile), 64, 4096)
    rng, errors = random.Random(3), []
    for _ in range(40):
        n = rng.choice([1, 2, 7, 33, 60])
        parts = [(rng.randrange(1, rng.choice([100, 2000])), 1, 1) for _ in range(n)]
        guesses, plain = rng.randrange(1, 4 * n + 1), StepShape.of(parts, times.windows)
        seen = [known.decode_tokens for known in plain.within]
        expected = float(times.exact(plain.with_guesses(guesses / n))) + times.guesses.draft_s(plain, guesses / n)
        found = times.guesses.seconds(n, float(plain.kv_tokens), guesses, seen=seen)
        assert found == pytest.approx(expected, rel=2e-3)
        prompts = StepShape.of([(rng.choice([0, 512]), rng.randrange(34, 1500), 1)], times.windows)
        expected = float(times.exact(plain.with_guesses(guesses / n) + prompts))
        expected += times.guesses.draft_s(plain + prompts.as_prompts(), guesses / n)
        errors.append(abs(times.guesses.seconds(n, float(plain.kv_tokens), guesses, prompts, seen=seen) / expected - 1))
    assert np.mean(errors) < 5e-3 and max(errors) < 0.03
