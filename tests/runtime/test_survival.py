"""What breaks is said in one sentence, the others are served, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from membound.app.jobs import process_born
from membound.kernels.dispatch import kernels_for
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.scenario import Scenario, load_scenario
from membound.runtime.disaggregated import handover
from membound.runtime.engine import Runtime
from membound.runtime.loading.loaded import load_model
from membound.runtime.parallel.group import Group, GroupError
from membound.runtime.plain import generate_plain
from membound.runtime.sampling import GreedySampler, Guesses, LogitsError, TemperatureSampler

H100 = get_hardware("H100-SXM5")


def served(folder: Path, **values: object) -> Scenario:
    """Synthetic prompts for the model in `folder`; `values` by dotted path with `__` for the dots."""
    synthetic = {"kind": "synthetic", "tokens": {"kind": "uniform", "low": 4, "high": 20}}
    chosen = load_scenario("live-cpu").model_copy(
        update={"model": str(folder / "config.json"), "weights": str(folder), "techniques": ()}
    )
    usual = {
        "workload.prompts": synthetic,
        "workload.requests": 6,
        "workload.output_tokens": {"kind": "uniform", "low": 2, "high": 20},
    }
    for path, value in (usual | {name.replace("__", "."): value for name, value in values.items()}).items():
        chosen = chosen.with_value(path, value)
    return chosen


@pytest.fixture
def copy(reference: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(reference / "tiny_llama3", tmp_path / "model"))


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(kernels=kernels_for("cpu", batch_invariant=True))


@pytest.mark.parametrize("kept", [0, 4, 40, 0.5, -1])
def test_a_safetensors_cut_short_is_named(kept: float, copy: Path) -> None:
    file = copy / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content)) if 0 < kept < 1 else int(kept)])
    with pytest.raises(MemboundError, match=r"model\.safetensors cannot be read"):
        load_model(served(copy))


@pytest.mark.parametrize("kept", [0, 4, 3000, 0.5, -1])
def test_a_gguf_cut_short_is_named(kept: float, tmp_path: Path, smollm2_path: Path) -> None:
    size = smollm2_path.stat().st_size
    left = int(kept * size) if 0 < kept < 1 else int(kept) % size
    cut = tmp_path / "cut.gguf"
    shutil.copy(smollm2_path, cut)
    os.truncate(cut, left)
    chosen = load_scenario("live-cpu").with_value("weights", str(cut))
    with pytest.raises(MemboundError, match=r"cut\.gguf is (truncated|not a GGUF)"):
        load_model(chosen)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("in_file", "said"),
    [("model.layers.1.self_attn.q_proj.weight", "layers.1.qkv"), ("model.norm.weight", "final_norm")],
)
def test_a_weight_that_is_no_number_is_named(value: float, in_file: str, said: str, copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors[in_file].view(-1)[3] = value
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(MemboundError, match=f"tensor {said} of model.* holds 1 of"):
        load_model(served(copy))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampler", [GreedySampler(), TemperatureSampler(0.7, seed=0)])
def test_a_row_of_logits_that_is_no_number_is_found_wherever_it_lies(sampler, value: float) -> None:
    for row, column in ((0, 0), (2, 5), (3, 49)):
        logits = torch.randn(4, 50)
        sampler.verify(logits, [Guesses()] * 4)
        logits[row, column] = value
        with pytest.raises(LogitsError) as error:
            sampler.verify(logits, [Guesses()] * 4)
        assert error.value.row == row


def test_the_step_and_the_request_whose_logits_overflow_are_named(copy: Path, runtime: Runtime) -> None:
    tensors = load_file(copy / "model.safetensors")
    head = torch.full_like(tensors["lm_head.weight"].float(), 3e38)
    save_file(tensors | {"lm_head.weight": head}, copy / "model.safetensors")
    with pytest.raises(MemboundError, match=r"step 1 gave logits of request \d+ that are NaN or infinite"):
        runtime.run(served(copy), H100)


def test_requests_beyond_the_context_are_turned_away_and_the_others_served(reference: Path, runtime: Runtime) -> None:
    result = runtime.run(
        served(reference / "tiny_llama3", workload__output_tokens={"kind": "uniform", "low": 4, "high": 120}), H100
    )
    assert 0 < result.summary.completed < 6 and result.summary.completed + result.summary.rejected == 6
    assert any("more than the 64 of the model's context" in note for note in result.provenance.notes)


def test_requests_beyond_the_memory_are_turned_away_and_the_others_served(reference: Path, runtime: Runtime) -> None:
    alone = runtime.run(served(reference / "tiny_llama3"), H100)
    tight = runtime.run(served(reference / "tiny_llama3", engine__num_blocks=1), H100)
    assert 0 < tight.summary.completed < 6 and tight.summary.completed + tight.summary.rejected == 6
    assert tight.outputs.items() <= alone.outputs.items()
    assert any("do not fit into 1 KV blocks" in note for note in tight.provenance.notes)


@pytest.mark.parametrize("field", ["engine.num_blocks", "workload.output_tokens"])
def test_where_nobody_can_be_served_that_is_said(field: str, reference: Path, runtime: Runtime) -> None:
    long = {"kind": "fixed", "tokens": 30 if field == "engine.num_blocks" else 1000}
    chosen = served(reference / "tiny_llama3", workload__output_tokens=long)
    chosen = chosen.with_value("engine.num_blocks", 1) if field == "engine.num_blocks" else chosen
    with pytest.raises(MemboundError, match=r"(every request was turned away)|(more than the 64)"):
        runtime.run(chosen, H100)


def test_memory_that_is_not_there_is_said(reference: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy_system(*sizes: object, **options: object) -> None:
        torch.empty(2**62, dtype=torch.uint8)

    monkeypatch.setattr("membound.runtime.assembly.generate_plain", greedy_system)
    with pytest.raises(MemboundError, match="memory ran out while 'live-cpu' ran"):
        runtime.run(served(reference / "tiny_llama3"), H100)


def test_a_full_place_for_what_is_handed_over_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*wanted: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemboundError, match=r"0\.1 MB, cannot be handed over in .*: No space left on device"):
        handover.put(tmp_path / "0", [torch.zeros(2, 50_000, dtype=torch.uint8)])


def test_followers_end_where_a_step_broke_off(reference: Path) -> None:
    """As after Ctrl-C in the middle of a step: they wait for a sum, so that nobody can tell them to stop."""
    runtime = Runtime(kernels=kernels_for("cpu", batch_invariant=True))
    chosen = served(reference / "tiny_llama3", parallel__tp=2)
    decoder = runtime.decoders.engine_decoder(chosen)
    expected = list(generate_plain(decoder, [4, 5, 6], 3))
    forward = decoder.part.forward
    decoder.part.forward = lambda *step: (_ for _ in ()).throw(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        list(generate_plain(decoder, [4, 5, 6], 3))
    decoder.part.forward = forward
    begun_s = time.monotonic()
    assert list(generate_plain(runtime.decoders.engine_decoder(chosen), [4, 5, 6], 3)) == expected
    assert not decoder.followers.alive
    runtime.close()
    assert time.monotonic() - begun_s < 60


def test_who_works_for_a_process_that_is_killed_ends_and_leaves_no_files(tmp_path: Path) -> None:
    """Also before they have met: while weights are read nobody listens."""
    shared = tmp_path / "shared"
    shared.mkdir()
    works = (
        "import sys, time; from pathlib import Path; from membound.runtime.orphans import end_with; "
        "end_with(int(sys.argv[1]), Path(sys.argv[2])); print('watching', flush=True); time.sleep(300)"
    )
    asks = (
        "import os, subprocess, sys; "
        f"child = subprocess.Popen([sys.executable, '-c', {works!r}, str(os.getpid()), {str(shared)!r}]); "
        "print(child.pid, flush=True); child.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", asks], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    said = {parent.stdout.readline().strip() for _ in range(2)}
    child = int(next(iter(said - {"watching"})))
    assert "watching" in said and process_born(child)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while process_born(child) or shared.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_leader_does_not_wait_long_for_a_follower_that_never_joins(tmp_path: Path) -> None:
    with pytest.raises(GroupError, match=r"gone or does not answer: [^/]+$"):
        Group(tmp_path / "meeting", 0, 2, "cpu", meeting_s=0.1)


def test_followers_end_with_a_leader_that_is_killed(reference: Path, tmp_path: Path) -> None:
    written = tmp_path / "scenario.yaml"
    chosen = served(reference / "tiny_llama3", parallel__tp=2)
    written.write_text(chosen.to_yaml(), encoding="utf-8")
    led = (
        "import sys, time; from membound.runtime.engine import Runtime; "
        "from membound.roofline.scenario import load_scenario; "
        f"decoder = Runtime('cpu').decoders.engine_decoder(load_scenario({str(written)!r})); "
        "print(decoder.followers.processes[0].pid, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    leader = subprocess.Popen([sys.executable, "-c", led], stdout=subprocess.PIPE, text=True, env=environment)
    assert leader.stdout is not None
    follower = int(leader.stdout.readline())
    leader.send_signal(signal.SIGKILL)
    leader.wait()
    deadline = time.monotonic() + 20
    while process_born(follower) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not process_born(follower)
    assert not list(tmp_path.glob("membound-parallel-*"))
