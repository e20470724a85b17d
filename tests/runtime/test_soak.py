"""After hundreds of requests under everything at once nothing is lost, left behind or wrong."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from membound.app.jobs import process_born
from membound.kernels.dispatch import kernels_for
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.scenario import Scenario, load_scenario
from membound.runtime.engine import Runtime
from membound.simulator.scheduling.loop import Executor
from membound.simulator.scheduling.request import Outcome, Sequence, Step

H100 = get_hardware("H100-SXM5")
MOST_GROWTH_BYTES = 48e6  # what allocators keep; the model and its cache take less than 1 MB
EASY = {"block_size": 4, "max_num_seqs": 16}
HARD = EASY | {
    "batching": "chunked_prefill",
    "max_batched_tokens": 48,
    "num_blocks": 40,
    "prefix_caching": True,
    "preemption": "swap",
    "host_kv_gib": 0.001,
}
DRAFTING = ["continuous_batching", {"name": "ngram_speculation", "gamma": 3}]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    runtime = Runtime(kernels=kernels_for("cpu", batch_invariant=True))
    yield runtime
    runtime.close()


def chats(folder: Path, seed: int, **values: object) -> Scenario:
    """Conversations of random lengths that share system prompts, from 8 users at once."""
    chosen = load_scenario("live-cpu").model_copy(
        update={"model": str(folder / "config.json"), "weights": str(folder), "techniques": ()}
    )
    prompts = {
        "kind": "sessions",
        "tokens": {"kind": "uniform", "low": 1, "high": 9},
        "turns": {"kind": "geometric", "mean": 2, "most": 4},
        "think": {"kind": "fixed", "seconds": 0},
        "system_tokens": 14,
        "groups": 3,
        "context_limit": 60,
    }
    usual = {
        "workload.prompts": prompts,
        "workload.output_tokens": {"kind": "uniform", "low": 1, "high": 24},
        "workload.requests": 60,
        "workload.seed": seed,
        "workload.arrivals.concurrency": 8,
        "engine": EASY,
    }
    for path, value in (usual | values).items():
        chosen = chosen.with_value(path, value)
    return chosen


def children() -> set[int]:
    """The living children of this process; tests before may have left pools that end whenever they are idle."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == os.getpid() and process_born(int(stat.parent.name)):
            found.add(int(stat.parent.name))
    return found


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_hundreds_of_requests_under_everything_at_once(runtime: Runtime, reference: Path) -> None:
    folder, before = reference / "tiny_llama3", children()
    first = runtime.run(chats(folder, 0, engine=HARD, techniques=DRAFTING), H100)
    assert first.summary.preemptions > 0 and first.summary.prefix_hit_rate > 0.2
    assert first.steps["accepted"].sum() > 0
    resident = resident_bytes()
    for seed in range(1, 4):
        engine = HARD if seed % 2 else HARD | {"preemption": "recompute"}
        result = runtime.run(chats(folder, seed, engine=engine, techniques=DRAFTING), H100)  # no block is lost
        assert result.summary.completed == result.summary.requests
        assert result.outputs == runtime.run(chats(folder, seed), H100).outputs
    assert resident_bytes() - resident < MOST_GROWTH_BYTES
    assert not children() - before


class Breaks:
    """Runs steps on `inner` until the one that fails."""

    def __init__(self, inner: Executor, at: int) -> None:
        self.inner = inner
        self.left = at

    def run(self, step: Step, sequences: dict[int, Sequence]) -> Outcome:
        self.left -= 1
        if self.left < 0:
            raise MemboundError("the device is gone")
        return self.inner.run(step, sequences)


def test_runs_that_break_off_leave_nothing_to_the_next(runtime: Runtime, reference: Path) -> None:
    folder, before = reference / "tiny_llama3", children()
    expected = runtime.run(chats(folder, 5), H100).outputs
    resident = resident_bytes()
    for at in (1, 5, 20, 40):
        with pytest.raises(MemboundError, match="the device is gone"):
            runtime.run(chats(folder, 5, techniques=DRAFTING), H100, wrap=lambda inner, at=at: Breaks(inner, at))
    assert runtime.run(chats(folder, 5), H100).outputs == expected
    assert resident_bytes() - resident < MOST_GROWTH_BYTES
    assert not children() - before


def test_a_thousand_users_at_once_are_all_served(runtime: Runtime, reference: Path) -> None:
    synthetic = {"kind": "synthetic", "tokens": {"kind": "uniform", "low": 1, "high": 6}}
    asked = chats(
        reference / "tiny_llama3",
        0,
        **{
            "workload.prompts": synthetic,
            "workload.output_tokens": {"kind": "uniform", "low": 1, "high": 2},
            "workload.requests": 1000,
            "workload.arrivals.concurrency": 1000,
            "engine": EASY | {"max_num_seqs": 256},
            "techniques": ["continuous_batching"],
        },
    )
    result = runtime.run(asked, H100)
    assert result.summary.completed == 1000
    assert sorted(result.outputs) == list(range(1000))


def test_processes_end_with_what_they_served(reference: Path) -> None:
    runtime, before = Runtime(kernels=kernels_for("cpu", batch_invariant=True)), children()
    folder = reference / "tiny_llama3"
    few = {"workload.requests": 6}
    alone = runtime.run(chats(folder, 7, **few), H100).outputs
    assert runtime.run(chats(folder, 7, **few, **{"parallel.tp": 2}), H100).outputs == alone
    assert len(children() - before) == 1
    runtime.close()
    assert not children() - before
