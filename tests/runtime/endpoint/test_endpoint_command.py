"""Do the commands reach a server, keep what it did, and refuse in one sentence what makes no sense?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from membound.app.endpoint_comparison import EndpointComparison
from membound.app.store import Store
from membound.roofline.scenario import load_scenario
from membound.roofline.validation.report import validate_table
from membound.simulator.run import run as simulate

SCENARIO = """
name: asked
model: SmolLM2-135M
hardware: H100-SXM5
workload:
  arrivals: {kind: closed_loop, concurrency: 2}
  requests: 4
  prompts: {kind: synthetic, tokens: {kind: fixed, tokens: 8}}
  output_tokens: {kind: fixed, tokens: 3}
repeats: 2
"""
RESULT = {
    "model_id": "org/model",
    "max_concurrency": 2,
    "request_rate": "inf",
    "duration": 2.0,
    "completed": 3,
    "total_input_tokens": 300,
    "total_output_tokens": 15,
    "request_throughput": 1.5,
    "mean_ttft_ms": 50.0,
    "mean_tpot_ms": 10.0,
}


@pytest.fixture
def asked(tmp_path: Path) -> str:
    path = tmp_path / "asked.yaml"
    path.write_text(SCENARIO)
    return str(path)


@pytest.fixture
def membound(tmp_path: Path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "membound.app.cli", *arguments]
        home = os.environ | {"MEMBOUND_HOME": str(tmp_path / "home")}
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=home)

    return run


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("membound: ")]
    return sentence


def test_a_server_is_measured_and_kept(serving, well, membound, asked, tmp_path) -> None:
    with serving(well) as server:
        done = membound("measure", asked, "--endpoint", server.url, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["summary"]["completed"] == 4
    assert document["provenance"]["producer"] == "endpoint"
    (run,) = Store(tmp_path / "home").runs("measure")
    assert run.table("requests").num_rows == 4 and run.table("steps").num_rows == 0
    assert "reason" in run.table("requests").column_names
    assert run.comparison()["provenance"]["endpoint"]["url"] == f"{server.url}/v1"


def test_a_run_that_served_nobody_is_kept_and_ends_with_exit_code_2(serving, well, membound, asked, tmp_path) -> None:
    probes = 2

    async def breaks(exchange) -> None:
        if exchange.number < probes:
            await well(exchange)
        else:
            await exchange.error(500, "out of memory")

    with serving(breaks) as server:
        done = membound("measure", asked, "--endpoint", server.url, "--json")
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout)["summary"]["completed"] == 0
    (run,) = Store(tmp_path / "home").runs("measure")
    assert run.summary["completed"] == 0


def test_a_server_is_held_against_its_prediction(serving, well, membound, asked, tmp_path) -> None:
    with serving(well) as server:
        done = membound("compare", asked, "--endpoint", server.url, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (row,) = document["comparisons"]
    assert (row["technique"], row["metric"], len(row["samples"])) == ("baseline", "tpot_s", 2)
    named = {(metric["metric"], metric["statistic"]) for metric in document["metrics"]}
    assert {("tpot_s", "mean"), ("ttft_s", "mean"), ("output_tokens_per_s", None)} <= named
    for metric in document["metrics"]:
        assert metric["error"] == pytest.approx(metric["predicted"] / metric["measured"] - 1)
    (run,) = Store(tmp_path / "home").runs("compare")
    producers = run.table("requests").column("producer").to_pylist()
    assert {producers.count(name) for name in ("simulator", "endpoint")} == {4, 8}


def test_of_a_server_that_served_other_lengths_than_predicted_no_error_is_given() -> None:
    run = simulate(load_scenario("live-cpu").with_values({"hardware": "H100-SXM5", "sweep": [], "variants": []}))
    shorter = replace(run, requests=run.requests | {"prompt_tokens": run.requests["prompt_tokens"] / 2})
    alike, other = EndpointComparison([], {}, {}), EndpointComparison([], {}, {})
    alike.judge({}, run, [run], "against itself")
    other.judge({}, run, [shorter], "against another load")
    assert alike.metrics and all(row["error"] == 0 for row in alike.metrics)
    assert other.metrics and all(row["error"] is None for row in other.metrics)
    assert any("no errors are given" in note for note in other.notes)


def test_a_result_of_another_tool_is_kept_beside_its_prediction(membound, tmp_path) -> None:
    file = tmp_path / "of-vllm.json"
    file.write_text(json.dumps(RESULT))
    table = tmp_path / "rows.csv"
    known = ("--model", "Llama-3.1-8B", "--hardware", "H100-SXM5", "--table", str(table))
    done = membound("import", str(file), *known, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["runs"][0]["summary"]["requests_per_s"] == 1.5
    assert document["comparisons"][0]["measured"] == pytest.approx(0.01)
    kept = {run.kind: run for run in Store(tmp_path / "home").runs()}
    assert kept.keys() == {"measure", "compare"} and kept["measure"].label == "of-vllm"
    rows = {result.row.text("metric"): result for result in validate_table(table).results}
    assert rows.keys() == {"tpot_ms", "ttft_ms", "throughput_tok_s_total"}
    assert (rows["tpot_ms"].row.measured, rows["throughput_tok_s_total"].row.measured) == (10.0, 7.5)
    assert all(result.predicted for result in rows.values())


def test_what_a_file_does_not_say_can_be_set(membound, tmp_path) -> None:
    file = tmp_path / "of-vllm.json"
    file.write_text(json.dumps(RESULT))
    given = ("--model", "Llama-3.1-8B", "--hardware", "H100-SXM5", "--set", "parallel.tp=2")
    done = membound("import", str(file), *given, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["runs"][0]["scenario"]["parallel"]["tp"] == 2


def test_what_makes_no_sense_is_one_sentence(membound, asked, tmp_path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"completed": 1')
    assert "is not JSON" in refused(membound("import", str(broken)))
    fine = tmp_path / "fine.json"
    fine.write_text(json.dumps(RESULT))
    assert "model 'Llama-3.1-9' is not in the catalog" in refused(
        membound("import", str(fine), "--model", "Llama-3.1-9")
    )
    assert "--endpoint" in refused(membound("measure", asked, "--endpoint-model", "m"))
    assert "connection refused" in refused(membound("compare", asked, "--endpoint", "http://127.0.0.1:9"))
    assert not list((tmp_path / "home").glob("runs/*"))


def test_a_server_is_measured_without_torch() -> None:
    modules = "membound.runtime.endpoint.measure, membound.app.commands.imports"
    check = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", check], check=True, timeout=120)
