"""Is the chosen size of drafts the best of all, and does what it costs rise with what it does?"""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from membound.roofline.hardware import get_hardware, hardware_of
from membound.roofline.hardware.calibration import Calibration
from membound.roofline.models import get_model
from membound.roofline.scenario import load_scenario
from membound.roofline.shape import StepShape
from membound.roofline.speculation.acceptance import AcceptanceProfile
from membound.roofline.speculation.draft_choice import acceptance_source, best_size
from membound.roofline.speculation.steps import Speculation
from membound.roofline.techniques import (
    DraftModelSpeculation,
    Eagle,
    Medusa,
    Mtp,
    NgramSpeculation,
    Size,
    Speculative,
    engine_setup,
)
from membound.roofline.times.known import times_for

H100 = times_for(get_hardware("H100-SXM5"))
LLAMA = get_model("Llama-3.1-8B")
OPEN = (NgramSpeculation(), DraftModelSpeculation(draft="Llama-3.2-1B"), Medusa(), Eagle())


def speculation(technique: Speculative) -> Speculation:
    return Speculation(LLAMA, engine_setup((technique,)))


@pytest.mark.parametrize("technique", OPEN, ids=lambda technique: technique.name)
@pytest.mark.parametrize("batch", [1.0, 32.0, 256.0])
def test_no_other_size_gains_more(technique, batch):
    """Each size costed alone; the choice costs them from tables, which may miss by a tile of a kernel."""
    drafts, shape = speculation(technique), StepShape.decode(batch, 1000.0)
    found = best_size(drafts, H100, shape, technique.sizes())
    best = max(float(drafts.with_size(size).speedup(H100, shape)) for size in technique.sizes())
    assert found.speedup == pytest.approx(max(best, 1.0), rel=0.01)


@pytest.mark.parametrize("technique", (NgramSpeculation(), Medusa(), Eagle()), ids=lambda technique: technique.name)
@pytest.mark.parametrize("batch", [1.0, 16.0])
def test_no_other_size_gains_more_where_caches_matter(technique, batch):
    """A calibrated machine's times depend on what the whole step reads, which a table of many sizes takes as one."""
    calibration = Calibration.load(Path(__file__).parents[1] / "app" / "calibration.json")
    times = times_for(hardware_of(calibration))
    drafts, shape = Speculation(get_model("SmolLM2-135M"), engine_setup((technique,))), StepShape.decode(batch, 500.0)
    sizes = list(technique.sizes())
    found = best_size(drafts, times, shape, sizes)
    best = max(float(drafts.with_size(size).speedup(times, shape)) for size in sizes[:: max(1, len(sizes) // 12)])
    assert found.speedup >= 0.995 * best
    if found.size is not None:
        assert found.speedup == pytest.approx(float(drafts.with_size(found.size).speedup(times, shape)))


@pytest.mark.parametrize("technique", OPEN, ids=lambda technique: technique.name)
def test_a_larger_batch_wants_no_more_guesses(technique):
    drafts = speculation(technique)
    guesses = []
    for batch in (1.0, 8.0, 64.0, 512.0):
        size = best_size(drafts, H100, StepShape.decode(batch, 1000.0), technique.sizes()).size
        guesses.append(0 if size is None else size.nodes or size.depth)
    assert guesses == sorted(guesses, reverse=True) and guesses[0] > 0


def test_what_is_named_is_kept_and_what_is_open_is_usual_elsewhere():
    assert not Eagle(depth=3, tree_size=3).is_open and Eagle(depth=3).is_open and Mtp().is_open
    assert Eagle().drafts().gamma == 5 and Eagle().drafts().tokens == 25
    with pytest.raises(ValidationError, match="depth is 7, more than tree_size, 3"):
        Eagle(depth=7, tree_size=3)
    assert {size.depth for size in Eagle(depth=3).sizes()} == {3}
    assert {size.nodes for size in Eagle(tree_size=12).sizes()} == {12}
    assert Eagle().sized(Size(2, 4)) == Eagle(depth=2, tree_size=4)


def test_smaller_trees_accept_less_of_the_same_content():
    """A profile is that of the table's tree: 25 nodes for EAGLE, whose guesses are as right at each depth."""
    profile = AcceptanceProfile.constant(0.7)
    tokens = [
        Speculation(LLAMA, engine_setup((Eagle(depth=5, tree_size=n, decay=1.0),)), profile).expected_tokens
        for n in (5, 12, 25)
    ]
    assert tokens == sorted(tokens) and tokens[0] < 0.9 * tokens[-1]
    chain = 1 + profile.expected_accepted(5)
    assert tokens[-1] == pytest.approx(chain)


def test_drafting_takes_longer_with_more_passes_and_sampling_with_more_guesses():
    shape = StepShape.decode(32.0, 1000.0)

    def draft_s(depth: int, nodes: int) -> float:
        return float(speculation(Eagle(depth=depth, tree_size=nodes)).draft_s(H100, shape))

    assert draft_s(2, 2) < draft_s(3, 3) < draft_s(5, 5) < draft_s(5, 25)
    lookup = [float(speculation(NgramSpeculation(gamma=gamma)).draft_s(H100, shape)) for gamma in (2, 8)]
    assert 0 < lookup[0] < lookup[1], "looking up is free, accepting is not"


def test_a_scenario_with_open_drafts_survives_yaml_open():
    eagle = load_scenario("plan-70b").with_techniques((Eagle(),))
    again = eagle.with_value("workload.seed", 2)
    assert again.techniques == (Eagle(),) and again.techniques[0].is_open


def test_an_acceptance_that_no_temperature_changes_says_so():
    scenario = load_scenario("plan-70b")
    greedy, sampled = (
        acceptance_source(Eagle(), scenario.with_value("temperature", temperature)) for temperature in (0.0, 0.7)
    )
    assert "temperature" not in greedy and "temperature of 0.7" in sampled
