"""On real weights and 50 prompts, no way of serving changes the greedy tokens of the plain loop."""

from __future__ import annotations

import pytest

from membound.kernels.dispatch import kernels_for
from membound.roofline.hardware import get_hardware
from membound.roofline.scenario import load_scenario
from membound.roofline.techniques import ContinuousBatching, NgramSpeculation
from membound.runtime.engine import Runtime
from membound.runtime.plain import generate_plain
from membound.simulator.scheduling.workload import requests_for

TOKENS = 24


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(kernels=kernels_for("cpu", batch_invariant=True))


@pytest.fixture(scope="module")
def scenario():
    chosen = load_scenario("live-cpu").with_value("workload.requests", 50).with_techniques(())
    return chosen.with_value("workload.output_tokens", {"kind": "fixed", "tokens": TOKENS})


@pytest.fixture(scope="module")
def plain(runtime, scenario) -> dict[int, list[int]]:
    requests = requests_for(scenario)
    assert len({request.prompt_ids for request in requests}) == 50
    decoder = runtime.decoder(scenario)
    return {request.id: list(generate_plain(decoder, request.prompt_ids, TOKENS)) for request in requests}


PAGED = ()
CONTINUOUS = (ContinuousBatching(),)
SPECULATIVE = (ContinuousBatching(), NgramSpeculation(gamma=4))


@pytest.mark.parametrize(
    ("techniques", "concurrency"),
    [(PAGED, 16), (CONTINUOUS, 16), (SPECULATIVE, 16), (SPECULATIVE, 1)],
    ids=["paged KV", "continuous batching", "n-gram speculation", "n-gram speculation alone"],
)
def test_greedy_tokens_equal_the_plain_loop(runtime, scenario, plain, techniques, concurrency):
    chosen = scenario.with_techniques(techniques).with_value("workload.arrivals.concurrency", concurrency)
    result = runtime.run(chosen, get_hardware("H100-SXM5"))
    assert result.outputs == plain
    if any(isinstance(technique, NgramSpeculation) for technique in techniques):
        assert result.steps["accepted"].sum() > 0


def test_few_blocks_preempt_and_recompute_the_same_tokens(runtime, scenario, plain):
    tight = scenario.with_value("engine.num_blocks", 40).with_value("workload.arrivals.concurrency", 16)
    result = runtime.run(tight.with_techniques((ContinuousBatching(),)), get_hardware("H100-SXM5"))
    assert result.summary.preemptions > 0
    assert result.outputs == plain
