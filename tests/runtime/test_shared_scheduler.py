"""Given the same step times, simulator and runtime make the same decision at every step.

The runtime computes every step with tensors, so the tokens are real; both clocks are moved by the same script of
step times. What is compared is the plan of every step: batch composition, admissions, preemptions, drafts, blocks.
"""

from __future__ import annotations

import itertools
import json
import random

import pytest
from scripted import ScriptedClock

from membound.kernels.dispatch import kernels_for
from membound.roofline.hardware import get_hardware
from membound.roofline.results.result import RunResult
from membound.roofline.scenario import Scenario, parse_scenario
from membound.runtime.engine import Runtime
from membound.simulator.run import run as simulate
from membound.simulator.scheduling.recorder import Recorder
from membound.simulator.scheduling.request import Outcome, Step

VOCAB = 61
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def step_times():
    rng = random.Random(5)
    return (rng.uniform(0.01, 0.2) for _ in itertools.count())


class ScriptedTimes:
    """Runs the real executor and says that the step took the next time of the script."""

    def __init__(self, executor) -> None:
        self.executor = executor
        self.times = step_times()
        self.outcomes: list[Outcome] = []

    def run(self, step, sequences) -> Outcome:
        emitted = self.executor.run(step, sequences).emitted
        self.outcomes.append(Outcome(next(self.times), emitted))
        return self.outcomes[-1]


class Replayed:
    """The simulator's stand-in for content: the tokens that the runtime emitted, under the same script of times."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = iter(outcomes)
        self.times = step_times()

    def run(self, step, sequences) -> Outcome:
        return Outcome(next(self.times), next(self.outcomes).emitted)


def scenario(folder, techniques, arrivals, num_blocks, **engine) -> Scenario:
    rng = random.Random(1)
    (folder / "config.json").write_text(json.dumps(TINY))
    prompts = folder / "prompts.jsonl"
    with prompts.open("w") as file:
        for i in range(12):
            ids = [rng.randrange(VOCAB) for _ in range(rng.randrange(3, 40))]
            item = {"id": f"p{i}", "task": "random", "text": "", "prompt_ids": ids, "output_ids": [0] * 40}
            file.write(json.dumps(item) + "\n")
    return parse_scenario(
        {
            "name": "proof",
            "model": str(folder / "config.json"),
            "hardware": "H100-SXM5",
            "engine": {"max_num_seqs": 5, "max_batched_tokens": 160, "block_size": 4, "num_blocks": num_blocks}
            | engine,
            "techniques": [{"name": name} for name in techniques],
            "workload": {
                "arrivals": arrivals,
                "requests": 24,
                "prompts": {"kind": "text", "file": str(prompts)},
                "output_tokens": {"kind": "uniform", "low": 2, "high": 40},
            },
        }
    )


@pytest.mark.parametrize("num_blocks", [200, 34], ids=["plenty", "tight"])
@pytest.mark.parametrize(
    "arrivals",
    [{"kind": "closed_loop", "concurrency": 7}, {"kind": "poisson", "rate_rps": 3.0}],
    ids=["closed", "open"],
)
@pytest.mark.parametrize(
    "techniques",
    [[], ["continuous_batching"], ["continuous_batching", "ngram_speculation"], ["ngram_speculation", "int8_weights"]],
    ids=["static", "continuous", "continuous+ngram", "static+ngram+int8"],
)
def test_equal_decisions_at_every_step(tmp_path, techniques, arrivals, num_blocks):
    chosen = scenario(tmp_path, techniques, arrivals, num_blocks)
    measured, _ = decided_alike(chosen)
    if num_blocks == 34 and "continuous_batching" in techniques:
        assert measured.summary.preemptions > 0
    if "ngram_speculation" in techniques:
        assert measured.steps["drafted"].sum() > 0


def decided_alike(chosen: Scenario, content_known: bool = True) -> tuple[RunResult, list[Step]]:
    """Runs a scenario really and virtually, asserts that all decisions are equal, and returns what really happened.

    Where the simulator does not know the content, its steps do not list the work of each sequence. Tokens of different
    runs are compared, so that a sequence's numbers may not depend on how many rows share its products.
    """
    scripted: list[ScriptedTimes] = []

    def wrap(executor):
        scripted.append(ScriptedTimes(executor))
        return scripted[0]

    real, virtual = Recorder(keep_plans=True), Recorder(keep_plans=True)
    hardware = get_hardware("H100-SXM5")
    runtime = Runtime(kernels=kernels_for("cpu", batch_invariant=True))
    measured = runtime.run(chosen, hardware, clock=ScriptedClock(), wrap=wrap, recorder=real)
    predicted = simulate(chosen, hardware, executor=Replayed(scripted[0].outcomes), recorder=virtual)

    assert len(real.plans) > 30
    if content_known:
        assert real.plans == virtual.plans
        assert measured.outputs == predicted.outputs
    else:
        assert [step._replace(work=(), steady=1) for step in real.plans] == [
            step._replace(steady=1) for step in virtual.plans
        ]
    for name in ("arrival_s", "admitted_s", "first_token_s", "finished_s"):
        assert measured.requests[name].tolist() == pytest.approx(
            predicted.requests[name].tolist(), abs=1e-9, nan_ok=True
        )
    return measured, real.plans


CLASSES = [
    {"name": "urgent", "share": 0.5, "priority": 0, "ttft_s": 0.5},
    {"name": "patient", "share": 0.5, "priority": 3, "ttft_s": 9.0},
]
POLICIES = {
    "prefill first": {"batching": "prefill_first"},
    "chunks": {"batching": "chunked_prefill", "max_batched_tokens": 12},
    "chunks by priority": {
        "batching": "chunked_prefill",
        "max_batched_tokens": 12,
        "order": "priority",
        "ageing_s": 0.1,
    },
    "deadlines": {"batching": "continuous", "order": "deadline"},
    "slack with a short queue": {"batching": "chunked_prefill", "order": "slack", "admission": {"max_waiting": 3}},
    "reserved": {"batching": "continuous", "reserved_tokens": 80},
    "swap": {"batching": "continuous", "preemption": "swap", "host_kv_gib": 1e-5},
    "swap, prompts alone": {"batching": "prefill_first", "preemption": "swap", "host_kv_gib": 1.0},
}


@pytest.mark.parametrize("num_blocks", [200, 34], ids=["plenty", "tight"])
@pytest.mark.parametrize("engine", POLICIES.values(), ids=POLICIES)
def test_equal_decisions_under_every_policy_that_runs(tmp_path, engine, num_blocks):
    arrivals = {"kind": "poisson", "rate_rps": 6.0}
    for techniques in ([], ["ngram_speculation"]):
        chosen = scenario(tmp_path, techniques, arrivals, num_blocks, classes=CLASSES, **engine)
        measured, steps = decided_alike(chosen)
        assert measured.summary.completed + measured.summary.rejected == 24
        chunked = any(not work.emits for step in steps for work in step.prompts)
        assert chunked == (engine.get("max_batched_tokens") == 12)


def conversations(folder, num_blocks, **engine) -> Scenario:
    """Turns that share a system prompt and their own history, whose answers are what the model really wrote."""
    asked = scenario(folder, [], {"kind": "closed_loop", "concurrency": 5}, num_blocks, **engine)
    document = asked.model_dump(mode="json")
    document["workload"] |= {
        "prompts": {
            "kind": "sessions",
            "tokens": {"kind": "uniform", "low": 1, "high": 12},
            "turns": {"kind": "geometric", "mean": 3},
            "think": {"kind": "exponential", "mean_s": 0.3},
            "system_tokens": 10,
            "groups": 2,
            "context_limit": 70,
        },
        "output_tokens": {"kind": "uniform", "low": 1, "high": 12},
        "requests": 40,
    }
    return parse_scenario(document)


KEPT_ON_HOST = 40 * 4 * 2 * 2 * 2 * 8 * 2 / 2**30  # 40 blocks of 4 tokens: K and V, 2 layers, 2 heads of 8, 2 bytes


@pytest.mark.parametrize(
    ("num_blocks", "host", "batching"),
    [
        (400, {}, "continuous"),
        (26, {}, "prefill_first"),
        (26, {}, "chunked_prefill"),
        (26, {"host_kv_gib": KEPT_ON_HOST}, "continuous"),
        (26, {"host_kv_gib": KEPT_ON_HOST}, "chunked_prefill"),
    ],
)
def test_shared_blocks_hold_what_the_simulator_says_and_change_no_token(tmp_path, num_blocks, host, batching):
    engine = {"batching": batching, "max_batched_tokens": 12 if batching == "chunked_prefill" else 160}
    shared, steps = decided_alike(conversations(tmp_path, num_blocks, prefix_caching=True, **host, **engine), False)
    assert sum(step.cached_tokens for step in steps) > 200
    if num_blocks == 26:
        assert shared.summary.preemptions > 0
        assert any(step.moved_blocks for step in steps) == bool(host)
    alone, _ = decided_alike(conversations(tmp_path, 400, **engine), False)
    assert shared.outputs == alone.outputs


def test_swapped_sequences_go_on_with_the_same_tokens(tmp_path):
    arrivals = {"kind": "closed_loop", "concurrency": 7}
    outputs = []
    for blocks, preemption in ((200, {}), (34, {"preemption": "swap", "host_kv_gib": 1.0})):
        for batching in ("continuous", "prefill_first", "chunked_prefill"):
            chosen = scenario(tmp_path, [], arrivals, blocks, batching=batching, **preemption)
            measured, steps = decided_alike(chosen)
            assert any(step.resumed for step in steps) == bool(preemption)
            outputs.append(measured.outputs)
    assert all(other == outputs[0] for other in outputs[1:])


def test_chunks_do_not_change_the_tokens(tmp_path):
    """A chunk attends to the cached part of its prompt, so greedy tokens are those of whole prompts."""
    outputs = []
    for engine in ({"batching": "continuous"}, {"batching": "chunked_prefill", "max_batched_tokens": 7}):
        chosen = scenario(tmp_path, [], {"kind": "closed_loop", "concurrency": 7}, 40, **engine)
        runtime = Runtime(kernels=kernels_for("cpu", batch_invariant=True))
        outputs.append(runtime.run(chosen, get_hardware("H100-SXM5")).outputs)
    assert outputs[0] == outputs[1]


def test_prompts_and_outputs_in_two_processes_write_the_same_tokens(tmp_path):
    chosen = scenario(tmp_path, ["continuous_batching"], {"kind": "closed_loop", "concurrency": 7}, 200)
    outputs = [
        Runtime(kernels=kernels_for("cpu", batch_invariant=True)).run(asked, get_hardware("H100-SXM5")).outputs
        for asked in (chosen, chosen.with_value("engine.disaggregation", {}))
    ]
    assert outputs[0] == outputs[1]


def test_the_techniques_named_lossless_do_not_change_the_tokens(tmp_path):
    arrivals = {"kind": "closed_loop", "concurrency": 7}
    outputs = [
        Runtime(kernels=kernels_for("cpu", batch_invariant=True))
        .run(scenario(tmp_path, techniques, arrivals, blocks), get_hardware("H100-SXM5"))
        .outputs
        for techniques in ([], ["continuous_batching"], ["continuous_batching", "ngram_speculation"])
        for blocks in (200, 34)
    ]
    assert all(other == outputs[0] for other in outputs[1:])
