"""Does the command answer bad input with one sentence and exit code 2, and with --json print one document?"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from membound.app import cli

Done = subprocess.CompletedProcess[str]
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


PREDICT_EXPLAINS = {"formats", "model", "groups", "ridge", "parallel", "origin", "remarks", "pipeline", "notes"}
OPERATORS = """source,gpu,op,model,tp,m,n,k,batch,q_len,kv_len,n_heads,n_kv_heads,head_dim,dtype,latency_us,notes
[/lab],H100-SXM5,gemm,,1,16,8192,8192,,,,,,,bf16,60,[red]first
[/lab],H100-SXM5,gemm,,1,4096,8192,8192,,,,,,,bf16,800,
[/lab],H100-SXM5,dance,,1,1,8,8,,,,,,,bf16,5,
"""


def started(*arguments: str) -> Done:
    """The command as a process of its own."""
    command = [sys.executable, "-P", "-m", "membound.app.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def membound(*arguments: str) -> Done:
    """The command in this process: to start one takes longer than most answers."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["membound", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
    code = left.value.code
    return Done(arguments, code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return str(path)


def refused(*arguments: str, run: Callable[..., Done] = membound) -> str:
    result = run(*arguments)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""
    (sentence,) = [line for line in result.stderr.splitlines() if line and "% " not in line[:6]]  # beside progress
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


def test_a_process_of_its_own_refuses_as_well(tiny: str) -> None:
    assert "hardware 'H1000' is unknown" in refused("simulate", tiny, "--set", "hardware=H1000", run=started)


def test_fields_that_need_each_other_are_set_at_once_and_each_once(tiny: str) -> None:
    together = ("--set", "parallel.ep=2", "--set", "parallel.dp=2", "--hardware", "H100-SXM5")
    mixture = ("predict", tiny, "--set", "model=Mixtral-8x7B", "--set", "techniques=[]")
    assert membound(*mixture, *together).returncode == 0
    assert "hardware is given twice" in refused("predict", tiny, "--hardware", "H100-SXM5", "--set", "hardware=L4")


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
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch, stocked: Callable[[Path], Path]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("MEMBOUND_HOME", str(stocked(tmp_path)))
    (tmp_path / "calibration").mkdir()
    (tmp_path / "calibration" / "local.json").write_text(CALIBRATION.read_text())
    assert "only 'local' and 'local-gpu' can be measured here" in refused("measure", tiny, run=started)
    assert "what was calibrated on this machine is its CPU" in refused("compare", "llama-8b-gpu", run=started)
    local = ("measure", tiny, "--set", "hardware=local", "--set")
    assert "does not fit" in refused(*local, "model=Llama-3.1-405B", run=started)
    assert "field 'weights' is 'nowhere'" in refused(*local, "weights=nowhere", run=started)


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["predict"], {"scenario", "point", "step", "operators", "memory", "hardware"} | PREDICT_EXPLAINS),
        (["simulate"], {"scenario", "summary", "provenance", "energy_j_per_token_at_board_power"}),
    ],
)
def test_json_is_one_document(tiny: str, arguments: list[str], keys: set[str]) -> None:
    result = started(arguments[0], tiny, "--json")
    assert result.returncode == 0, result.stderr
    assert set(json.loads(result.stdout)) == keys


def test_predict_explains_its_number(tiny: str) -> None:
    shown = membound("predict", tiny, "--set", "model=DeepSeek-V3", "--batch", "8", "--set", "parallel={tp: 8}").stdout
    for part in ("attention", "ffn", "communication", "2.experts", "lm_head"):
        assert f" {part} " in shown
    words = " ".join(shown.split())
    assert "1. 3 mla, gated MLP; 2. 58 mla, moe" in words
    assert "on 8 devices (tp 8): operators, bytes and memory are those of one of them" in words
    assert "times below the ridge of" in words and "would still fit: " in words
    assert "measured on H100-SXM5" in words and "interval ±" in words


def test_predict_says_where_its_load_is_one_of_static_batches(tiny: str) -> None:
    """The same question with another technique would have another batch, and nobody would know why."""

    def told(*more: str) -> bool:
        return "batches are static" in " ".join(
            membound("predict", tiny, "--set", "engine.profile=vllm", *more).stdout.split()
        )

    assert told("--set", "techniques=[w8a8]")
    assert not told("--set", "techniques=[w8a8, continuous_batching]")
    assert not told("--set", "techniques=[w8a8]", "--batch", "8", "--context", "100")
    assert not told("--set", "techniques=[w8a8]", "--phase", "prefill")


def test_validate_prints_one_document_and_writes_every_row(tmp_path: Path) -> None:
    table, rows = tmp_path / "ops.csv", tmp_path / "rows.csv"
    table.write_text(OPERATORS)
    result = membound("validate", str(table), "--rows", str(rows), "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["rows"], document["predicted"], document["refused"]) == (3, 2, 1)
    assert {"by", "n", "median_ape", "p90_ape", "bias", "within_interval"} <= set(document["groups"][0])
    (reason,) = document["refusals"]
    with rows.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [*written[0]][-4:] == ["predicted", "low", "high", "reason"]
    assert [row["latency_us"] for row in written] == ["60", "800", "5"]
    assert written[2]["reason"] == reason and "dance" in reason and written[2]["predicted"] == ""
    for row in written[:2]:
        assert 0 < float(row["low"]) < float(row["predicted"]) < float(row["high"])


def test_words_of_a_table_are_printed_as_they_are(tmp_path: Path) -> None:
    table = tmp_path / "ops.csv"
    table.write_text(OPERATORS)
    result = membound("validate", str(table))
    assert result.returncode == 0, result.stderr
    assert "[/lab]" in result.stdout and "by device" in result.stdout


def test_validate_refuses_what_it_cannot_read_or_must_not_write(tmp_path: Path) -> None:
    table = tmp_path / "ops.csv"
    table.write_text(OPERATORS)
    assert "is the table itself" in refused("validate", str(table), "--rows", str(table))
    assert table.read_text() == OPERATORS
    assert "cannot be written" in refused("validate", str(table), "--rows", str(tmp_path / "no" / "rows.csv"))
    assert "cannot be read" in refused("validate", str(tmp_path / "missing.csv"))
    table.write_text("a,b\n1,2\n")
    assert "lacks the columns" in refused("validate", str(table))


def test_calibrate_from_a_table_keeps_fits_that_predict_names(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path / "home"))
    table = tmp_path / "ops.csv"
    table.write_text(OPERATORS.replace("H100-SXM5", "MI210").replace("bf16,", "bf16,9"))
    result = membound("calibrate", "--from", str(table), "--device", "MI210", "--json")
    assert result.returncode == 0, result.stderr
    (device,) = json.loads(result.stdout)["devices"]
    assert device["device"] == "MI210" and device["rows"] == 2 and Path(device["file"]).is_file()
    assert {"rows", "median_error_before", "median_error_after", "spread"} <= set(device["residuals"][0])
    words = " ".join(membound("validate", str(table)).stdout.split())
    assert "in-sample: kernels of MI210 were fitted to this table" in words and " µs, predicted " in words
    predicted = json.loads(membound("predict", tiny, "--hardware", "MI210", "--json").stdout)
    assert any("ops.csv" in kernel["sources"] for kernel in predicted["origin"]["kernels"])


def test_a_home_that_cannot_keep_a_calibration_is_said_before_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took minutes, and was lost at their end."""
    from membound.runtime.calibration import calibrate as measuring

    taken = tmp_path / "file"
    taken.touch()
    monkeypatch.setenv("MEMBOUND_HOME", str(taken / "home"))
    monkeypatch.setattr(measuring, "calibrate", lambda **_: pytest.fail("it was measured"))
    assert "Cannot write to" in refused("calibrate", "--quick")


def test_options_of_the_two_calibrations_are_not_mixed(tmp_path: Path) -> None:
    assert "option --device needs --from" in refused("calibrate", "--device", "MI210")
    assert "option --threads is for measuring" in refused("calibrate", "--from", "x.csv", "--threads", "2")
    assert "'x.csv' cannot be read" in refused("calibrate", "--from", "x.csv")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_standard_output_is_one_sentence(tiny: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-P", "-m", "membound.app.cli", "predict", tiny, "--json"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("membound: cannot write the result") and "Traceback" not in result.stderr


def test_a_data_sheet_that_is_kept_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path / "home"))
    table, sheet = tmp_path / "ops.csv", tmp_path / "mine.yaml"
    table.write_text(OPERATORS.replace("H100-SXM5", "Mine"))
    sheet.write_text(
        "name: Mine\nvendor: Somebody\nkind: gpu\nmemory_bytes: 80000000000\nbandwidth_bytes_per_s: 3.35e+12\n"
        "matrix_flops: {bf16: 9.89e+14}\nsource: a test\n"
    )
    result = membound("calibrate", "--from", str(table), "--device", str(sheet))
    assert result.returncode == 0, result.stderr
    (kept,) = (tmp_path / "home" / "hardware").iterdir()
    assert f"the data sheet is kept in '{kept}'" in result.stderr
    assert membound("predict", "live-cpu", "--hardware", "Mine").returncode == 0


def test_a_value_beyond_all_measure_leaves_no_warning(tmp_path: Path) -> None:
    table = tmp_path / "ops.csv"
    table.write_text(OPERATORS.replace(",60,", ",1e30,"))
    assert started("validate", str(table)).stderr == ""
