"""Do a kept run's page and timeline hold what was run, and does the history say who made it?"""

from __future__ import annotations

import io
import json
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from membound.app.compare import predict_rows
from membound.app.i18n import LANGUAGES, Translate
from membound.app.keeping import keep_comparison, keep_run
from membound.app.run_files import has_steps, perfetto, producer_of, run_page
from membound.app.store import Store
from membound.roofline.hardware import get_hardware
from membound.roofline.reading.plain_yaml import parse_yaml
from membound.roofline.results.result import RunResult
from membound.roofline.scenario import Scenario, parse_scenario
from membound.runtime.endpoint.record import no_steps
from membound.simulator.run import run as simulate

T = Translate("en")
SCENARIO = """
name: small
model: Llama-3.1-8B
hardware: H100-SXM5
workload:
  arrivals: {kind: closed_loop, concurrency: 2}
  requests: 6
  prompts: {kind: synthetic, tokens: {kind: fixed, tokens: 64}}
  output_tokens: {kind: fixed, tokens: 8}
techniques: [{name: int8_weights}]
"""


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return parse_scenario(parse_yaml(SCENARIO, "scenario"))


@pytest.fixture(scope="module")
def simulated(scenario: Scenario) -> RunResult:
    return simulate(scenario, get_hardware(scenario.hardware))


def _made_by(result: RunResult, **provenance: Any) -> RunResult:
    made = result.provenance.model_dump() | provenance
    return replace(result, provenance=type(result.provenance).model_validate(made))


def test_the_timeline_of_a_kept_run_has_all_its_steps_and_tokens(
    tmp_path: Path, scenario: Scenario, simulated: RunResult
) -> None:
    store = Store(tmp_path)
    run = store.run(keep_run(store, "simulate", scenario, simulated))
    assert has_steps(run)
    steps = [event for event in json.loads(perfetto(run))["traceEvents"] if event.get("cat") == "step"]
    assert sum(event["args"]["steps"] for event in steps) == simulated.steps["steps"].sum()
    assert sum(event["args"]["emitted"] for event in steps) == 6 * 8
    assert sum(event["dur"] for event in steps) / 1e6 == pytest.approx(simulated.steps["time_s"].sum())


def test_a_comparison_has_a_timeline_for_each_of_its_runs(tmp_path: Path, scenario: Scenario) -> None:
    store = Store(tmp_path)
    result = predict_rows(scenario, get_hardware(scenario.hardware))
    run = store.run(keep_comparison(store, scenario, result))
    with zipfile.ZipFile(io.BytesIO(perfetto(run))) as archive:
        assert len(archive.namelist()) == len(result.predicted) == 2
        for name in archive.namelist():
            told = json.loads(archive.read(name))["traceEvents"]
            assert sum(event["args"]["emitted"] for event in told if event.get("cat") == "step") == 6 * 8


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_asks_nothing_of_a_server_and_holds_conditions_and_scenario(scenario: Scenario, language: str) -> None:
    result = predict_rows(scenario, get_hardware(scenario.hardware)).to_json()
    hostile = scenario.to_yaml() + "# <script>alert(1)</script>"
    page = run_page(result, hostile, "<b>", language, Translate(language))
    assert f"<html lang='{language}'>" in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page)
    assert "<script>alert(1)" not in page and "<b>" not in page
    assert "Llama-3.1-8B" in page and result["comparisons"][0]["conditions"] in page
    assert page.count("Plotly.newPlot") >= 2
    assert page.count("plotly.js v") == 1


def test_the_page_of_a_single_run_says_who_made_it(simulated: RunResult, scenario: Scenario) -> None:
    document = _made_by(simulated, producer="runtime", notes=["two stalls & more"]).to_json()
    page = run_page(document, scenario.to_yaml(), "run", "en", T)
    assert "two stalls &amp; more" in page and T("metric.ttft_s") in page and "runtime" in page


@pytest.mark.parametrize(
    ("provenance", "said"),
    [
        ({"producer": "simulator"}, T("producer.simulator")),
        ({"producer": "runtime"}, T("producer.runtime")),
        ({"producer": "endpoint", "endpoint": {"url": "http://h:1"}}, T("producer.server", url="http://h:1")),
        ({"producer": "endpoint", "endpoint": {"tool": "guidellm"}}, T("producer.imported", tool="guidellm")),
    ],
)
def test_a_kept_run_says_who_made_it(
    tmp_path: Path, scenario: Scenario, simulated: RunResult, provenance: dict[str, Any], said: str
) -> None:
    store = Store(tmp_path)
    kind = "simulate" if provenance["producer"] == "simulator" else "measure"
    run = store.run(keep_run(store, kind, scenario, _made_by(simulated, **provenance)))
    assert producer_of(run, T) == said


def test_a_servers_run_has_no_timeline(tmp_path: Path, scenario: Scenario, simulated: RunResult) -> None:
    store = Store(tmp_path)
    served = replace(_made_by(simulated, producer="endpoint"), steps=no_steps())
    assert not has_steps(store.run(keep_run(store, "measure", scenario, served)))
