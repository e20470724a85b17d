"""Trees of guesses against chains of the same drafter, as others counted both."""

import csv
from pathlib import Path

import numpy as np
import pytest

from membound.roofline.models.files import resolve_model
from membound.roofline.speculation.published import acceptance_for, alpha_of, counted
from membound.roofline.speculation.token_tree import GROWN_RANK_EXPONENT, RANK_EXPONENT
from membound.roofline.techniques.drafts import EagleDrafts
from membound.roofline.techniques.steps import Eagle

PAIRS = list(csv.DictReader((Path(__file__).parent / "published" / "trees.csv").open(encoding="utf-8")))
EXPONENTS = {"fixed": RANK_EXPONENT, "grown": GROWN_RANK_EXPONENT}
DECAY = Eagle.model_fields["decay"].default


def emitted(alpha: float, depth: int, nodes: int, exponent: float) -> float:
    drafts = EagleDrafts(gamma=depth, nodes=nodes, alpha=alpha, decay=DECAY, rank_exponent=exponent)
    return 1.0 + drafts.tree.expected_accepted


def alpha_for(tokens: float, depth: int, nodes: int, exponent: float) -> float:
    """The chance of the best first guess with which a step emits so many tokens, by halves."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if emitted(middle, depth, nodes, exponent) < tokens else (low, middle)
    return low


def from_chain(pair: dict[str, str], exponent: float) -> float:
    """Tokens of the pair's tree over those that were counted, where its chain was counted too."""
    depth = int(pair["chain_depth"])
    alpha = alpha_for(float(pair["chain_emitted"]), depth, depth, exponent)
    return emitted(alpha, int(pair["depth"]), int(pair["nodes"]), exponent) / float(pair["emitted"])


@pytest.mark.parametrize("kind", ["fixed", "grown"])
def test_chains_lead_to_the_trees_of_the_same_drafter(kind):
    ratios = np.array([from_chain(pair, EXPONENTS[kind]) for pair in PAIRS if pair["kind"] == kind])
    assert abs(np.median(ratios) - 1) < 0.02 and np.abs(ratios - 1).max() < 0.07
    before = np.array([from_chain(pair, 0.4) for pair in PAIRS if pair["kind"] == kind])
    assert np.abs(ratios - 1).mean() < np.abs(before - 1).mean()


def test_a_fixed_tree_leads_to_a_grown_one_of_the_same_drafter_that_no_exponent_was_taken_from():
    """Spec-Bench, Vicuna-7B, A100: EAGLE's 25 fixed nodes emit 3.58 tokens a step, EAGLE-2's 60 that grow 4.34."""
    alpha = alpha_for(3.58, 5, 25, RANK_EXPONENT)
    assert emitted(alpha, 6, 60, GROWN_RANK_EXPONENT) == pytest.approx(4.34, rel=0.03)
    assert emitted(alpha_for(3.58, 5, 25, 0.4), 6, 60, 0.4) < 0.94 * 4.34


def test_counts_of_one_model_agree_on_its_alpha_whether_of_chains_or_of_trees():
    drafts = Eagle(depth=3, tree_size=3).drafts()
    alphas = [alpha_of(row, drafts) for row in counted() if row.kind == "eagle" and row.model == "Llama-3.1-8B"]
    assert len(alphas) >= 4 and max(alphas) - min(alphas) < 0.04


def test_a_model_of_which_only_a_tree_was_counted_has_no_higher_alpha_than_one_that_emits_as_much_by_chains():
    """Llama-3.3-70B: 5.88 tokens with 63 guesses are 0.85 a guess, not 0.90."""
    drafts = Eagle(depth=3, tree_size=3).drafts()
    found = acceptance_for(resolve_model("Llama-3.3-70B"), drafts)
    assert found is not None and found.pair and 0.83 < found.alpha < 0.87
