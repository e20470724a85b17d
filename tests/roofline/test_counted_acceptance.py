"""Does a speculator accept what others counted for its model, and does the interval know how far counts differ?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from membound.roofline.models.files import resolve_model
from membound.roofline.scenario import Scenario, load_scenario
from membound.roofline.speculation.draft_choice import acceptance_source
from membound.roofline.speculation.published import acceptance_for, alpha_of, counted
from membound.roofline.speculation.steps import speculation_of, with_counted_alpha
from membound.roofline.speculation.token_tree import RANK_EXPONENT
from membound.roofline.techniques import Eagle, Medusa, Mtp, Speculative
from membound.simulator.run import run
from membound.simulator.stacking.stacking import stack

KINDS = {"eagle": Eagle(), "medusa": Medusa(), "mtp": Mtp()}


def scenario(model: str = "Llama-3.1-8B", technique: Speculative | None = None, **workload: object) -> Scenario:
    asked = load_scenario("plan-70b").with_values({"model": model, "parallel.tp": 1, "slo": {}, "sweep": []})
    loop = {"arrivals": {"kind": "closed_loop", "concurrency": 4}, "requests": 200}
    asked = asked.with_value("workload", asked.workload.model_dump(mode="json") | loop | workload)
    return asked.with_techniques((*asked.techniques, technique or Eagle(depth=3, tree_size=3)))


@pytest.mark.parametrize("row", counted(), ids=lambda row: f"{row.kind} {row.model} {row.depth} {row.emitted}")
def test_the_alpha_of_a_row_emits_what_the_row_counts(row):
    """And each names its source; none emits more than its longest path and one."""
    sized = KINDS[row.kind].drafts()
    found = alpha_of(row, sized)
    exponent = min(sized.rank_exponent, RANK_EXPONENT) if row.fixed else sized.rank_exponent
    tree = replace(sized, gamma=row.depth, nodes=row.nodes, alpha=found, rank_exponent=exponent).tree
    assert 1.0 + tree.expected_accepted == pytest.approx(row.emitted, rel=1e-3)
    assert 0.0 < found <= 1.0 and row.emitted <= row.depth + 1 and len(row.source) > 10


@pytest.mark.parametrize(("depth", "emitted"), [(2, 2.36), (3, 2.79), (7, 3.53)])
def test_one_alpha_tells_what_was_counted_at_every_length(depth, emitted):
    """EAGLE-3 for Llama-3.1-8B on MT-bench: vLLM issues 20780 and 26191."""
    found = speculation_of(scenario(technique=Eagle(depth=depth, tree_size=depth)))
    assert found.expected_tokens == pytest.approx(emitted, rel=0.01)


def test_who_gives_an_alpha_gets_it_and_without_doubt_about_it():
    for given in (0.79, 0.5):
        asked = scenario(technique=Eagle(depth=3, tree_size=3, alpha=given))
        found = speculation_of(asked)
        assert found.drafts.alpha == given and found.acceptance_error == 0.0
        assert with_counted_alpha(asked, found.model) is asked
        assert acceptance_source(Eagle(alpha=given), asked) == "the scenario"


def test_a_model_that_nobody_counted_has_the_usual_alpha_and_a_wider_interval():
    counted_here, usual = (speculation_of(scenario(model)) for model in ("Llama-3.1-8B", "Qwen3-8B"))
    assert usual.drafts.alpha == Eagle.usual_alpha
    assert 0.0 < counted_here.acceptance_error < usual.acceptance_error
    assert "default" in acceptance_source(Eagle(), scenario("Qwen3-8B"))
    assert "vLLM issue" in acceptance_source(Eagle(), scenario())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Llama-3.3-70B", "DeepSeek-V3", "Qwen3-8B"])
def test_an_interval_holds_its_alpha_and_no_impossible_one(kind, model):
    found = acceptance_for(resolve_model(model), KINDS[kind].drafts())
    assert 0.0 <= found.low < found.alpha < found.high <= 1.0


def test_a_single_count_may_be_at_either_end_of_what_counts_of_one_model_differ_by():
    """Llama-3.3-70B was counted once, with a tree; of Llama-3.1-8B chains were, and a tree."""
    drafts = Eagle().drafts()
    alphas = [alpha_of(row, drafts) for row in counted() if (row.kind, row.model) == ("eagle", "Llama-3.1-8B")]
    found = acceptance_for(resolve_model("Llama-3.3-70B"), drafts)
    assert found.alpha - found.low >= max(alphas) - min(alphas)
    several = acceptance_for(resolve_model("Llama-3.1-8B"), drafts)
    assert several.low <= min(alphas) and several.high - several.low < found.high - found.low


def test_a_task_keeps_its_profile_but_not_its_certainty():
    asked = scenario(task="code")
    found = speculation_of(asked)
    assert found.profile is not None and found.acceptance_error > 0.0
    assert with_counted_alpha(asked, found.model) is asked


def test_a_run_accepts_as_many_tokens_as_the_closed_form():
    asked = scenario()
    summary = run(asked).summary
    assert summary.tokens_per_step / 4 == pytest.approx(speculation_of(asked).expected_tokens, rel=0.06)


@pytest.mark.parametrize(("model", "alpha", "less"), [("Qwen3-8B", 0.79, 1.01), ("Llama-3.1-8B", 0.777, 1.0)])
def test_a_gain_by_speculation_is_less_sure_than_its_times_and_a_given_acceptance_as_sure(model, alpha, less):
    """Much less where nobody counted the model; of Llama-3.1-8B all counts agree within 0.03."""

    def widths(technique: Speculative) -> dict[str, float]:
        (found,) = stack(scenario(model, technique=technique))
        return {step.technique: step.high / step.gain for step in found.alone if step.gain}

    unsure, given = widths(Eagle(depth=3, tree_size=3)), widths(Eagle(depth=3, tree_size=3, alpha=alpha))
    assert unsure["eagle"] > less * given["eagle"]
    assert unsure["continuous_batching"] == pytest.approx(given["continuous_batching"])
