"""A request that windows leave no blocks for is refused in words that add up."""

import re

from membound.roofline.errors import MemboundError
from membound.roofline.scenario import parse_scenario
from membound.simulator.run import run


def refusal(model: str) -> str:
    scenario = parse_scenario(
        {
            "name": "x",
            "model": model,
            "hardware": "H100-SXM5",
            "engine": {"block_size": 8, "num_blocks": 45},
            "techniques": ["continuous_batching"],
            "workload": {
                "arrivals": {"kind": "closed_loop", "concurrency": 2},
                "requests": 4,
                "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 300}},
                "output_tokens": {"kind": "fixed", "tokens": 40},
            },
        }
    )
    try:
        notes = run(scenario).provenance.notes
    except MemboundError as error:
        return str(error)
    return next((note for note in notes if "do not fit into" in note), "")


def test_blocks_that_windows_take_are_named_and_the_rest_is_too_small():
    """340 tokens are 43 blocks of 8, fewer than the 45 that there are: it is the windows that take the others."""
    told = re.search(
        r"(\d+) tokens do not fit into (\d+) KV blocks of (\d+), of which .* take (\d+)", refusal("gpt-oss-20b")
    )
    assert told is not None
    tokens, blocks, size, taken = map(int, told.groups())
    assert -(-tokens // size) <= blocks < -(-tokens // size) + taken


def test_a_model_without_windows_is_served_in_as_many_blocks():
    assert refusal("Llama-3.1-8B") == ""
