"""Which sizes of drafts engines take where nobody names one."""

import pytest

from membound.roofline.scenario import parse_scenario
from membound.roofline.speculation.draft_choice import served_sizes
from membound.roofline.techniques import Eagle, Medusa, Mtp
from membound.simulator.drafting import with_best_drafts


def eagle(profile: str, **given):
    return parse_scenario(
        {
            "name": "x",
            "model": "Llama-3.1-8B",
            "hardware": "H100-SXM5",
            "engine": {"profile": profile},
            "techniques": ["continuous_batching", {"name": "eagle"} | given],
            "workload": {
                "arrivals": {"kind": "closed_loop", "concurrency": 1},
                "requests": 4,
                "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 500}},
                "output_tokens": {"kind": "fixed", "tokens": 100},
            },
        }
    )


@pytest.mark.parametrize("technique", [Eagle(), Medusa(), Eagle(depth=4)])
def test_vllm_takes_chains_and_sglang_trees_too(technique):
    chains = list(served_sizes(technique, "vllm"))
    assert chains and all(size.nodes == size.depth for size in chains)
    assert {size.depth for size in chains} == {size.depth for size in technique.sizes()}
    assert list(served_sizes(technique, "sglang")) == list(technique.sizes())


def test_a_tree_that_is_asked_for_is_taken_and_what_has_no_trees_is_as_it_was():
    assert {size.nodes for size in served_sizes(Eagle(tree_size=12), "vllm")} == {12}
    assert list(served_sizes(Mtp(), "vllm")) == list(Mtp().sizes())


def test_one_user_gets_a_chain_in_vllm_and_a_tree_in_sglang():
    chain, tree = (with_best_drafts(eagle(profile)).parameters for profile in ("vllm", "sglang"))
    assert chain is not None and chain["tree_size"] == chain["depth"] and "asked_by" not in chain
    assert tree is not None and tree["tree_size"] > tree["depth"]
    asked = with_best_drafts(eagle("vllm", tree_size=32)).parameters
    assert asked is not None and asked["tree_size"] == 32 and asked["asked_by"] == "speculative_token_tree"
