"""A rehearsal warms what serves and leaves nothing behind: no request, no token, no number is another for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from membound.kernels.reference import TorchKernels
from membound.roofline.hardware import get_hardware
from membound.roofline.scenario import Scenario, parse_scenario
from membound.runtime import assembly
from membound.runtime.engine import Runtime
from membound.runtime.rehearsal import STEPS_OF_PROMPTS, rehearsal_of
from membound.simulator.scheduling.request import Request

MODEL = {
    "name": "tiny",
    "layers": 2,
    "hidden": 32,
    "vocab": 128,
    "attention": {"kind": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 16},
    "ffn": {"kind": "moe", "experts": 4, "top_k": 2, "intermediate": 32},
    "tie_embeddings": False,
    "max_context": 128,
    "source": "a test",
}


def scenario_of(folder: Path, **changes: Any) -> Scenario:
    (folder / "model.yaml").write_text(yaml.safe_dump(MODEL))
    document = {
        "name": "rehearsed",
        "model": str(folder / "model.yaml"),
        "hardware": "A100-SXM4-80GB",
        "engine": {"max_num_seqs": 4, "max_batched_tokens": 64, "block_size": 16},
        "workload": {
            "arrivals": {"kind": "closed_loop", "concurrency": 4},
            "requests": 6,
            "prompts": {"kind": "synthetic", "tokens": {"kind": "uniform", "low": 8, "high": 60}},
            "output_tokens": {"kind": "fixed", "tokens": 7},
        },
        **changes,
    }
    return parse_scenario(document)


class CountingKernels(TorchKernels):
    """Compiles a kernel for one row, for multiples of 16 and for other numbers between two powers of two, as Triton."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.seen: set[tuple[int, bool]] = set()

    def linear(self, x, weight):  # type: ignore[no-untyped-def]
        self.seen.add((len(x).bit_length(), len(x) % 16 == 0))
        return super().linear(x, weight)

    def compilations(self) -> int:
        return len(self.seen)


@pytest.mark.parametrize("technique", [None, {"name": "self_speculation", "layers": 1, "gamma": 2}])
def test_a_rehearsed_run_emits_the_same_tokens_in_the_same_steps(
    technique: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = scenario_of(tmp_path, techniques=[technique] if technique else [])
    scenario = scenario.with_value("engine.prefix_caching", technique is None)
    cold, warm = CountingKernels(), CountingKernels()
    plain = Runtime(kernels=cold).run(scenario, get_hardware(scenario.hardware))
    monkeypatch.setattr(assembly, "compiles_when_called", lambda device: True)
    result = Runtime(kernels=warm).run(scenario, get_hardware(scenario.hardware))
    assert result.outputs == plain.outputs and len(plain.outputs) == 6
    assert result.steps["tokens"].tolist() == plain.steps["tokens"].tolist()
    counted = [[note for note in run.provenance.notes if "kernels were compiled" in note] for run in (plain, result)]
    during = [int(notes[0].split()[0]) if notes else 0 for notes in counted]
    assert during[0] > 3 * during[1]
    routers = [[note for note in run.provenance.notes if "routers filled" in note] for run in (plain, result)]
    assert routers[0] == routers[1] != []


def test_a_cpu_does_not_rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rehearse(*arguments: object) -> None:
        raise AssertionError("its kernels are compiled")

    monkeypatch.setattr(assembly, "rehearse", rehearse)
    scenario = scenario_of(tmp_path)
    Runtime(kernels=TorchKernels()).run(scenario, get_hardware(scenario.hardware))


@given(
    prompts=st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    turns=st.integers(0, 2),
    most=st.integers(1, 32),
    batched=st.integers(64, 8192),
)
def test_a_rehearsal_has_the_longest_prompt_and_few_tokens_beside_it(
    prompts: list[int], turns: int, most: int, batched: int
) -> None:
    requests = []
    for number, tokens in enumerate(prompts):
        request = Request(10 * number, 1.0 * number, tokens, 50, (1,) * tokens)
        for turn in range(turns):
            later = Request(10 * number + turn + 1, 0.0, tokens + 7, 50, (1,) * (tokens + 7), think_s=3.0)
            request = replace(later, id=request.id, follow_up=replace(request, id=later.id))
        requests.append(request)
    chosen = rehearsal_of(requests, most, batched, 5000)
    known = {turn.id for request in requests for turn in request.turns()}
    assert not known & {one.id for one in chosen} and len({one.id for one in chosen}) == len(chosen) <= most
    fitting = [turn.prompt_tokens for one in requests for turn in one.turns() if turn.tokens <= 5000]
    assert [one.prompt_tokens for one in chosen[:1]] == sorted(fitting)[-1:]
    assert all(one.prompt_ids == (1,) * one.prompt_tokens and one.follow_up is None for one in chosen)
    assert all(one.output_tokens <= 6 and one.arrival_s == one.think_s == 0 for one in chosen)
    assert sum(one.prompt_tokens for one in chosen[1:]) <= max(STEPS_OF_PROMPTS * batched, 65 * most)
