"""A process for prompts and one for outputs write what one process writes, and every request ends once."""

from __future__ import annotations

import pytest

from membound.kernels.dispatch import kernels_for
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.memory import weights_bytes
from membound.roofline.models import get_model
from membound.roofline.scenario import Scenario, load_scenario
from membound.runtime.clock import WallClock
from membound.runtime.disaggregated import run
from membound.runtime.disaggregated.run import PrefillProcess, Router
from membound.runtime.engine import Runtime
from membound.simulator.scheduling.recorder import Recorder

H100 = get_hardware("H100-SXM5")


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(kernels=kernels_for("cpu", batch_invariant=True))


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    chosen = load_scenario("live-cpu").with_value("workload.requests", 8)
    chosen = chosen.with_value("workload.output_tokens", {"kind": "uniform", "low": 1, "high": 16})
    return chosen.with_value("techniques", ["continuous_batching"])


def test_tokens_are_those_of_one_engine_and_requests_are_conserved(
    runtime: Runtime, scenario: Scenario, smollm2_path: object
) -> None:
    one = runtime.run(scenario, H100)
    two = runtime.run(scenario.with_value("engine.disaggregation", {}), H100)
    assert two.outputs == one.outputs
    assert two.summary.completed == scenario.workload.requests
    assert two.requests["id"].tolist() == one.requests["id"].tolist()
    assert two.requests["output_tokens"].tolist() == one.requests["output_tokens"].tolist()
    assert two.steps["prefill_sequences"].sum() >= scenario.workload.requests
    for earlier, later in (
        ("arrival_s", "admitted_s"),
        ("admitted_s", "first_token_s"),
        ("first_token_s", "finished_s"),
    ):
        assert (two.requests[earlier] <= two.requests[later]).all()
    assert any("moved through shared memory" in note for note in two.provenance.notes)


def test_each_engine_has_half_of_the_memory(
    runtime: Runtime, scenario: Scenario, smollm2_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that holds the weights once, K and V beside them, and not the weights twice."""
    monkeypatch.setattr(PrefillProcess, "__init__", lambda *_: None)
    monkeypatch.setattr(PrefillProcess, "end", lambda *_: None)
    weights = weights_bytes(get_model("SmolLM2-135M"), scenario.setup)
    small = H100.model_copy(update={"memory_bytes": 1.9 * weights})
    runtime.assemble(scenario, WallClock(), small, Recorder())
    with pytest.raises(MemboundError, match="does not fit"):
        runtime.run(scenario.with_value("engine.disaggregation", {}), small)


def test_who_is_turned_away_by_either_engine_is_said_and_leaves_nothing_on_the_host(
    runtime: Runtime, scenario: Scenario, smollm2_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    routers: list[Router] = []
    serve = run._serve
    monkeypatch.setattr(run, "_serve", lambda *parts: routers.append(serve(*parts)) or routers[0])
    crowded = scenario.with_value("workload.requests", 12).with_value("workload.arrivals.concurrency", 12)
    crowded = crowded.with_value("engine.disaggregation", {}).with_value("engine.admission", {"max_waiting": 1})
    result = runtime.run(crowded, H100)
    assert sorted(result.requests["id"].tolist()) == list(range(12))
    assert 0 < result.summary.completed < 12
    assert any("requests wait, and at most 1 may" in note for note in result.provenance.notes)
    assert not routers[0].mover.host and not routers[0].requests


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("engine.disaggregation", {"prefill_engines": 2}, "one of each"),
        ("techniques", ["continuous_batching", "self_speculation"], "has not read the prompt"),
        ("techniques", [{"name": "kv_quantization", "format": "kivi2"}], "newest 128 tokens of a sequence outside"),
        ("techniques", [{"name": "kv_eviction", "policy": "streaming"}], "a cache that evicts does not have"),
        ("parallel", {"tp": 2}, "engine.disaggregation on 2 devices is predicted"),
    ],
)
def test_what_two_processes_do_not_do_is_refused_before_anything_is_loaded(
    field: str, value: object, said: str, runtime: Runtime, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefillProcess, "__init__", lambda *_: pytest.fail("a process was started"))
    asked = scenario.with_value("engine.disaggregation", {}).with_value(field, value)
    with pytest.raises(MemboundError, match=said):
        runtime.run(asked, H100)


def test_a_killed_prefill_process_is_said_in_one_sentence(
    runtime: Runtime, scenario: Scenario, smollm2_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = PrefillProcess.say

    def kill(self: PrefillProcess, line: str) -> None:
        said(self, line)
        self.process.kill()

    monkeypatch.setattr(PrefillProcess, "say", kill)
    with pytest.raises(MemboundError, match="the process that computes prompts ended by SIGKILL"):
        runtime.run(scenario.with_value("engine.disaggregation", {}), H100)
