"""A sequence lives on one data-parallel rank, in that rank's memory, and finds prefixes there alone."""

from __future__ import annotations

import numpy as np
import pytest

from membound.roofline.errors import MemboundError
from membound.roofline.footprint import Footprint
from membound.roofline.hardware import get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.scenario import Scenario, parse_scenario
from membound.simulator.deployment import deployment_of
from membound.simulator.run import deploy, run
from membound.simulator.scheduling.request import Step

H100 = get_hardware("H100-SXM5")


def scenario(dp: int, requests: int = 60, prompt: int = 2000, output: int = 40, **engine: object) -> Scenario:
    return parse_scenario(
        {
            "name": "ranks",
            "model": "Qwen3-30B-A3B",
            "hardware": "H100-SXM5",
            "parallel": {"dp": dp, "ep": dp},
            "engine": {"batching": "chunked_prefill"} | engine,
            "workload": {
                "arrivals": {"kind": "poisson", "rate_rps": 60.0},
                "requests": requests,
                "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": prompt}},
                "output_tokens": {"kind": "uniform", "low": 1, "high": output},
            },
        }
    )


def asking(dp: int) -> Scenario:
    """Many conversations that share a system prompt."""
    prompts = {
        "kind": "sessions",
        "tokens": {"kind": "fixed", "tokens": 100},
        "turns": {"kind": "fixed", "count": 2},
        "think": {"kind": "fixed", "seconds": 0.2},
        "system_tokens": 1600,
    }
    chosen = scenario(dp, prefix_caching=True)
    return chosen.with_value("workload.prompts", prompts)


@pytest.mark.parametrize("blocks_of_rank", [130, 200])
def test_what_no_rank_holds_is_refused_however_much_all_of_them_hold(blocks_of_rank):
    """A prompt of 2000 tokens takes 125 blocks, and its longest output 3 more; ranks have the rest of 8 times that."""
    served = run(scenario(8, num_blocks=8 * blocks_of_rank))
    assert served.summary.completed == 60
    longer = run(scenario(8, num_blocks=8 * blocks_of_rank, prompt=16 * blocks_of_rank + 1))
    assert longer.summary.rejected == 60


def test_no_rank_ever_holds_more_than_its_blocks_and_every_step_is_looked_at():
    chosen = scenario(4, num_blocks=4 * 270, output=400)
    deployment, _ = deploy(chosen)
    steps: list[Step] = []
    result = run(chosen, observer=lambda step, outcome, end_s: steps.append(step))
    assert result.summary.completed == 60 and result.summary.preemptions
    assert deployment.memory.ranks == 4 and deployment.memory.num_blocks == 4 * 270
    assert max(step.sequences for step in steps) <= 4 * (270 // 125), "two sequences fit on each of four ranks"


@pytest.mark.parametrize("batching", ["static", "continuous", "prefill_first", "chunked_prefill"])
@pytest.mark.parametrize("preemption", [{}, {"preemption": "swap", "host_kv_gib": 0.2}])
def test_equal_steps_run_as_one_on_several_ranks(batching, preemption):
    chosen = scenario(4, num_blocks=4 * 200, output=300, **preemption).with_values(
        {"engine.batching": batching, "workload.prompts.tokens.tokens": 1500}
    )
    together, apart = run(chosen), run(chosen, step_by_step=True)
    for name in ("admitted_s", "first_token_s", "finished_s", "preemptions"):
        np.testing.assert_allclose(together.requests[name], apart.requests[name], rtol=1e-9)
    assert together.summary.kv_utilization == pytest.approx(apart.summary.kv_utilization, rel=1e-9)
    assert len(together.steps["steps"]) < len(apart.steps["steps"])


def test_a_prefix_is_found_on_the_rank_that_has_it_alone():
    """The system prompt is computed once on each rank at least, and on one rank once."""
    one, eight = run(asking(1)), run(asking(8))
    assert eight.summary.completed == one.summary.completed
    computed = [float(r.requests["prompt_tokens"].sum() - r.requests["cached_tokens"].sum()) for r in (one, eight)]
    assert computed[1] - computed[0] >= 7 * 1600 - 8 * 16


@pytest.mark.parametrize("tokens", [1000.0, 40_960.0, 100_000.0])
@pytest.mark.parametrize("dp", [2, 8])
def test_whole_sequences_fit_on_whole_ranks(dp, tokens):
    chosen = scenario(dp)
    model = resolve_model(chosen.model)
    held = Footprint.of(model, chosen.setup)
    fitting = held.sequences(H100.memory_bytes, tokens)
    of_rank = fitting / dp
    assert of_rank == int(of_rank)
    assert of_rank * held.sequence_bytes(tokens) <= held.room(H100.memory_bytes)
    assert (of_rank + 1) * held.sequence_bytes(tokens) > held.room(H100.memory_bytes)
    assert deployment_of(chosen, model, H100).largest_batch(tokens) == fitting


def test_a_sequence_takes_the_same_bytes_of_a_rank_however_many_there_are():
    model = resolve_model("DeepSeek-V3")
    each = [Footprint.of(model, scenario(dp).setup).sequence_bytes(1e5) for dp in (1, 2, 8)]
    assert each[0] == each[1] == each[2] == pytest.approx(1e5 * 70_272)


def test_fewer_blocks_than_ranks_are_refused_in_a_sentence():
    with pytest.raises(MemboundError, match=r"each of the 8 ranks of parallel\.dp needs blocks of its own"):
        run(scenario(8, num_blocks=7))
