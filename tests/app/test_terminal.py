"""Is progress told where nobody looks, and do exit codes say whether there is an answer?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from membound.app.commands.terminal import _Lines, progress
from membound.roofline.hardware import get_hardware

ASKED = """
name: asked
model: Llama-3.1-8B
hardware: H100-SXM5
workload:
  arrivals: {kind: poisson, rate_rps: 1000}
  requests: 4
  prompts: {kind: synthetic, tokens: {kind: fixed, tokens: 8192}}
  output_tokens: {kind: fixed, tokens: 4}
"""


def test_of_long_work_each_stage_is_a_line_and_of_a_long_stage_every_ten_seconds(capsys) -> None:
    now = [0.0]
    lines = _Lines(lambda: now[0], 1.0)
    told = [(0.1, "soon"), (2.0, "1 of 9"), (3.0, "2 of 9"), (13.0, "5 of 9"), (14.0, "6 of 9"), (15.0, "checking")]
    for at_s, message in told:
        now[0] = at_s
        lines.show(at_s / 20, message)
    assert capsys.readouterr().err.splitlines() == [" 10% 1 of 9", " 65% 5 of 9", " 75% checking"]


def test_short_work_leaves_no_line(capsys) -> None:
    with progress() as listener:
        listener.progress(0.5, "half")
    assert capsys.readouterr().err == ""


@pytest.fixture
def asked(tmp_path: Path) -> str:
    path = tmp_path / "asked.yaml"
    path.write_text(ASKED)
    return str(path)


def test_exit_codes_say_whether_there_is_an_answer(membound, asked: str, tmp_path: Path) -> None:
    table = tmp_path / "ops.csv"
    columns = "source,gpu,op,model,tp,m,n,k,batch,q_len,kv_len,n_heads,n_kv_heads,head_dim,dtype,latency_us,notes"
    table.write_text(f"{columns}\na,H100-SXM5,dance,,1,1,8,8,,,,,,,bf16,5,\n")
    late = ("--set", "engine={max_batched_tokens: 16384, admission: {only_in_time: true}}", "--set", "slo.ttft_s=1e-6")
    shared = ("--set", "engine.prefix_caching=true", "--techniques", "int8_weights", "--batch", "1")
    for arguments in (("simulate", asked, *late), ("stack", asked, *shared), ("validate", str(table))):
        assert membound(*arguments)[0] == 2
        code, out, _ = membound(*arguments, "--json")
        assert code == 2 and json.loads(out)
    assert membound("simulate", asked, "--set", "engine.max_batched_tokens=16384")[0] == 0


def test_more_threads_than_cores_are_refused_before_torch_is_imported(membound) -> None:
    code, _, err = membound("calibrate", "--threads", "4000")
    assert code == 2 and "option --threads is 4000, but this machine has" in err


def test_what_does_not_fit_is_refused_before_the_machine_is_calibrated(
    membound, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path / "home"))
    code, _, err = membound("measure", asked, "--set", "hardware=local", "--set", "model=Llama-3.1-405B")
    assert code == 2 and "does not fit" in err and "not calibrated" not in err


@pytest.mark.parametrize("columns", ["1", "40", "80"])
def test_no_number_is_cut_however_narrow_the_terminal_is(membound, asked: str, monkeypatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    swept = ("--closed-form", "--jobs", "1", "--over", "batch=1,2", "--over", "context=512,1024")
    loop = ("--set", "workload.arrivals={kind: closed_loop, concurrency: 1}")
    for arguments in (("predict", asked), ("sweep", asked, *loop, *swept)):
        code, out, _ = membound(*arguments)
        assert code == 0 and "…" not in out


def test_a_data_sheet_with_the_name_of_another_device_is_told(membound, asked: str, tmp_path: Path) -> None:
    sheet = tmp_path / "mine.yaml"
    h100 = get_hardware("H100-SXM5")
    sheet.write_text(h100.to_yaml())
    assert "is called" not in membound("predict", asked, "--hardware", str(sheet))[2]
    sheet.write_text(h100.model_copy(update={"bandwidth_bytes_per_s": 3.9e12}).to_yaml())
    code, _, err = membound("predict", asked, "--hardware", str(sheet))
    assert code == 0 and "is called H100-SXM5, as a device of the catalog is" in err


def test_an_option_s_problem_is_said_once(membound, asked: str, tmp_path: Path) -> None:
    for given in (tmp_path / "x.csv", tmp_path / "no" / "x.csv"):
        (tmp_path / "x.csv").mkdir(exist_ok=True)
        code, _, err = membound("sweep", asked, "--over", "parallel.tp=1,2", "--csv", str(given))
        assert code == 2 and err.count("option --csv") == 1


def test_profiles_are_found_in_any_capitals_and_ports_end(membound, asked: str) -> None:
    assert membound("predict", asked, "--set", "engine.profile=vLLM")[0] == 0
    code, _, err = membound("dashboard", "--port", "99999")
    assert code == 2 and "option --port is '99999'" in err and "65535" in err
