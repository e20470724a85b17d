"""Does the command answer bad input with one sentence and exit code 2, and with --json print one document?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CALIBRATION = Path(__file__).parent / "calibration.json"
TINY = """
name: tiny
model: SmolLM2-135M
hardware: H100-SXM5
workload:
  arrivals: {kind: closed_loop, concurrency: 2}
  requests: 2
  prompts: {kind: synthetic, tokens: {kind: fixed, tokens: 5}}
  output_tokens: {kind: fixed, tokens: 4}
"""


def membound(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "membound.app.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **options)


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return str(path)


def refused(*arguments: str) -> str:
    result = membound(*arguments)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""
    (sentence,) = [line for line in result.stderr.splitlines() if line]
    return sentence


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("model=Lama-3.1-8B", "did you mean Llama-3.1-8B"),
        ("hardware=H1000", "hardware 'H1000' is unknown"),
        ("workload.requests=-1", "'workload.requests' is -1"),
        ("workload.requests=2020-13-45", "a value that YAML cannot read"),
        ("workload.seed=-1", "'workload.seed' is -1"),
        ("workload.output_tokens={kind: fixed, tokens: 99999999999999999999}", "less than or equal to 10000000"),
        ("engine.num_blocks=999999999", "holds at most"),
        ("sweep=[{nope: 1}]", "field 'nope' is not in the scenario"),
        ("sweep=[&a {x: *a}]", "sweep"),
        ("colour=blue", "field 'colour' is not in the scenario"),
        ("workload", "give KEY=VALUE"),
    ],
)
def test_bad_values_are_one_sentence(tiny: str, assignment: str, said: str) -> None:
    assert said in refused("simulate", tiny, "--set", assignment)


def test_bad_files_are_one_sentence(tmp_path: Path, tiny: str) -> None:
    deep = tmp_path / "deep.yaml"
    deep.write_text("name: " + "[" * 5000)
    assert "nested too deep" in refused("simulate", str(deep))
    assert "neither a file nor shipped" in refused("simulate", "x" * 400)
    config = tmp_path / "config.json"
    config.write_text('{"architectures": 5}')
    assert "must be a list of names" in refused("predict", tiny, "--set", f"model={config}")
    prompts = tmp_path / "binary.jsonl"
    prompts.write_bytes(b"\xff\xfe")
    text = f"workload.prompts={{kind: text, file: {prompts}}}"
    assert "not UTF-8 text" in refused("simulate", tiny, "--set", text)
    gguf = tmp_path / "truncated.gguf"
    gguf.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x01" * 40)
    assert "truncated.gguf" in refused("predict", tiny, "--set", f"model={gguf}")


def test_a_damaged_calibration_is_one_sentence(tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path))
    assert "is missing; run `membound calibrate`" in refused("predict", tiny, "--hardware", "local")
    (tmp_path / "calibration").mkdir()
    (tmp_path / "calibration" / "local.json").write_bytes(bytes(range(256)))
    assert "damaged" in refused("predict", tiny, "--hardware", "local")


def test_measuring_what_this_machine_is_not_or_cannot_hold_is_refused(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path))
    (tmp_path / "calibration").mkdir()
    (tmp_path / "calibration" / "local.json").write_text(CALIBRATION.read_text())
    assert "only 'local' can be measured here" in refused("measure", tiny)
    local = ("measure", tiny, "--set", "hardware=local", "--set")
    assert "does not fit" in refused(*local, "model=Llama-3.1-405B")
    assert "field 'weights' is 'nowhere'" in refused(*local, "weights=nowhere")


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["predict"], {"scenario", "point", "step", "operators", "memory", "hardware"}),
        (["simulate"], {"scenario", "summary", "provenance"}),
    ],
)
def test_json_is_one_document(tiny: str, arguments: list[str], keys: set[str]) -> None:
    result = membound(arguments[0], tiny, "--json")
    assert result.returncode == 0, result.stderr
    assert set(json.loads(result.stdout)) == keys


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_standard_output_is_one_sentence(tiny: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-P", "-m", "membound.app.cli", "predict", tiny, "--json"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("membound: cannot write the result") and "Traceback" not in result.stderr
