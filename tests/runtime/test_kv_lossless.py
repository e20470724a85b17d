"""On real weights, sharing blocks, moving them to the host and a budget that holds everything change no token."""

from __future__ import annotations

import pytest

from membound.kernels.dispatch import kernels_for
from membound.roofline.hardware import get_hardware
from membound.roofline.scenario import Scenario, parse_scenario
from membound.roofline.techniques import KvEviction
from membound.runtime.engine import Runtime

TOKENS = 12
BLOCKS_OF_CONVERSATIONS = 26
BYTES_OF_A_BLOCK = 16 * 30 * 2 * 3 * 64 * 2  # 30 layers, K and V of 3 heads of 64, in 2 bytes


@pytest.fixture(scope="module")
def runtime(smollm2_path) -> Runtime:
    return Runtime(kernels=kernels_for("cpu", batch_invariant=True))


def conversations(**engine) -> Scenario:
    return parse_scenario(
        {
            "name": "turns",
            "model": "SmolLM2-135M",
            "weights": "pretrained",
            "hardware": "H100-SXM5",
            "techniques": ["continuous_batching"],
            "engine": {"max_num_seqs": 4, "block_size": 16} | engine,
            "workload": {
                "arrivals": {"kind": "closed_loop", "concurrency": 3},
                "requests": 9,
                "prompts": {
                    "kind": "sessions",
                    "tokens": {"kind": "uniform", "low": 5, "high": 30},
                    "turns": {"kind": "fixed", "count": 3},
                    "think": {"kind": "fixed", "seconds": 0.0},
                    "system_tokens": 40,
                },
                "output_tokens": {"kind": "fixed", "tokens": TOKENS},
            },
        }
    )


@pytest.fixture(scope="module")
def alone(runtime) -> dict[int, list[int]]:
    return runtime.run(conversations(), get_hardware("H100-SXM5")).outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        {"prefix_caching": True, "num_blocks": BLOCKS_OF_CONVERSATIONS},
        {
            "prefix_caching": True,
            "num_blocks": BLOCKS_OF_CONVERSATIONS,
            "host_kv_gib": 12 * BYTES_OF_A_BLOCK / 2**30,
        },
        {"preemption": "swap", "host_kv_gib": 1.0, "num_blocks": 12},
    ],
    ids=["shared and tight", "shared, evicted to the host", "swapped"],
)
def test_sharing_and_moving_blocks_change_no_token(runtime, alone, engine):
    result = runtime.run(conversations(**engine), get_hardware("H100-SXM5"))
    assert result.outputs == alone
    if engine.get("preemption") == "swap":
        assert result.summary.preemptions > 0
    else:
        assert result.steps["tokens"].sum() < sum(result.requests["prompt_tokens"]), "prompts were found, not computed"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o", "quest"])
def test_a_budget_that_holds_everything_changes_no_token(runtime, alone, policy):
    scenario = conversations()
    techniques = (*scenario.techniques, KvEviction(policy=policy, budget=512))
    assert runtime.run(scenario.with_techniques(techniques), get_hardware("H100-SXM5")).outputs == alone
