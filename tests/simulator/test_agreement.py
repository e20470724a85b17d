"""Published results come out in direction, and within the factor that each case states; what does not says why.

Figures and factors are those of `serving.py`, `distserve.py` and `steps.py` in `simulator/agreement/`.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from membound.simulator.agreement import published as agreement
from membound.simulator.agreement.published import READING, Case, Ours, Range, cases, table, verdict
from membound.simulator.agreement.serving import capacity, paging_batch, serving
from membound.simulator.agreement.steps import eagle_gain, marlin_gain, su_gain
from membound.simulator.run import deploy, run
from membound.simulator.scheduling.request import Outcome, Sequence, Step

CASES = {case.name: case for case in cases()}
PAGE = Path(agreement.__file__).with_name("AGREEMENT.md")


@pytest.mark.parametrize("name", CASES)
def test_a_published_result_comes_out_within_the_stated_factor(name: str) -> None:
    case = CASES[name]
    value = case.value(1.0)
    assert 1 / case.within <= case.miss(value) <= case.within
    if case.unit == "x" and case.published.low > 1 + READING:
        assert value > 1, "what was published as a gain is one"
    if not 1 / (1 + READING) <= case.miss(value) <= 1 + READING:
        assert case.why, "a difference has a reason"


def test_speculation_falls_with_the_batch_as_su_et_al_measured() -> None:
    lengths, gains = zip(*(su_gain(batch) for batch in (1, 2, 4, 8, 16, 32)), strict=True)
    assert list(lengths) == sorted(lengths, reverse=True) and lengths[-1] < lengths[0]
    assert list(gains) == sorted(gains, reverse=True)
    # Published: 2.73x at 1 and 1.31x at 32, so that more than a third of the gain is gone.
    assert gains[-1] < 0.65 * gains[0]


@pytest.mark.parametrize(("hardware", "profile", "depth"), [("H100-SXM5", "sglang", 3), ("RTX-3090", "vllm", 2)])
def test_eagle_falls_with_the_batch_and_sooner_on_the_smaller_gpu(hardware: str, profile: str, depth: int) -> None:
    gains = [eagle_gain(hardware, profile, depth, batch) for batch in (2, 8, 24, 56)]
    assert all(after <= before * 1.01 for before, after in itertools.pairwise(gains))
    assert (gains[-1] < 1.15) == (hardware == "RTX-3090"), "1.01x at 56 with vLLM, 1.38x at 64 on an H100"


def test_int4_falls_to_nothing_by_a_batch_of_128_and_tensor_parallelism_leaves_less_of_it() -> None:
    """MARLIN, table 2: 2.93x to 1.20x for 7B on an A10, 1.38x to 1.07x for 70B on eight A100."""
    alone = [marlin_gain("Llama-2-7B", "A10", 1, batch) for batch in (1, 16, 32, 64, 128)]
    together = [marlin_gain("Llama-2-70B", "A100-SXM4-80GB", 8, batch) for batch in (1, 16, 32, 64, 128)]
    for gains in (alone, together):
        assert all(after < before for before, after in itertools.pairwise(gains))
        assert gains[-1] < 1.3
    assert together[0] < 0.75 * alone[0]


def test_paging_batches_four_times_as_many_as_reservation_of_the_maximum() -> None:
    """Kwon et al., figure 13a: 4.3 times as many requests."""
    assert paging_batch("vllm", 1.0) / paging_batch("orca-max", 1.0) == pytest.approx(4.3, rel=0.15)


class _Slowed:
    """An executor whose steps all take `factor` times as long."""

    def __init__(self, executor, factor: float) -> None:
        self.executor, self.factor = executor, factor

    def run(self, step: Step, sequences: dict[int, Sequence]) -> Outcome:
        outcome = self.executor.run(step, sequences)
        return outcome._replace(time_s=outcome.time_s * self.factor, slope_s=outcome.slope_s * self.factor)


def test_slower_steps_are_the_same_as_a_clock_that_runs_slower() -> None:
    """What the intervals rest on: steps f times as long at a rate r take f times what they take at a rate f r."""
    lengths = {"kind": "uniform", "low": 20, "high": 400}
    at = serving("Llama-3.1-8B", "H100-SXM5", lengths, lengths, batching="chunked_prefill", max_num_seqs=32)
    factor = 1.5
    slow = run(at(4.0, 120), executor=_Slowed(deploy(at(4.0, 120))[0].executor(), factor))
    same = run(at(4.0 * factor, 120))
    for name in ("arrival_s", "admitted_s", "first_token_s", "finished_s"):
        np.testing.assert_allclose(slow.requests[name], factor * same.requests[name], rtol=1e-6)


@given(st.floats(0.01, 1000), st.floats(0.01, 1000))
def test_bracketing_finds_the_largest_good_rate(limit: float, start: float) -> None:
    found = capacity(lambda rate: rate <= limit, start)
    assert found <= limit <= 1.05 * found


@given(st.floats(0.1, 50), st.floats(1, 3), st.floats(0.1, 50), st.floats(1.001, 3))
def test_a_verdict_is_which_side_of_the_published_range_ours_lies(low: float, width: float, value: float, error: float):
    case = Case("a", "b", "c", "d", "e", Range(low, low * width), "simulated", lambda slower: value / slower, 0.3, 2.0)
    found = verdict(case, Ours(value, value / error, value * error))
    if found == "lower":
        assert value * error < low and case.miss(value) < 1
    elif found == "higher":
        assert value / error > low * width and case.miss(value) > 1
    elif found == "agrees":
        assert 1 / error <= case.miss(value) * (1 + 1e-9) and case.miss(value) <= error * (1 + 1e-9)
    else:
        assert not 1 / error <= case.miss(value) <= error
        assert 1 / ((1 + 2 * READING) * error) <= case.miss(value) <= (1 + READING) * error
    ours = case.ours()
    assert ours.low == pytest.approx(value / 1.3) and ours.high == pytest.approx(value * 1.3)


def test_the_table_names_what_is_compared_with_what_and_groups_reasons() -> None:
    shown = [
        Case(name, "w", "the baseline", "cond", "src", Range.of(2.0), "closed form", lambda slower: 4.0 / slower, 0.1,
             3.0, why="because")
        for name in ("one", "two")
    ]  # fmt: skip
    text = table(shown)
    assert "| one | w | the baseline | 2 x | 4 (3.64 to 4.4) x | 2.00 | closed form | higher |" in text
    assert "* **one, two**: cond. Source: src." in text and "* **one, two**: because." in text


def test_the_page_that_is_kept_has_every_case_with_its_published_figure() -> None:
    page = PAGE.read_text("utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert [row[0].removeprefix("| ") for row in rows] == list(CASES)
    for row, case in zip(rows, CASES.values(), strict=True):
        low = float(row[3].split(" ")[0].replace(",", ""))
        assert low == pytest.approx(case.published.low, rel=0.01)
