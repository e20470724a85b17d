"""An experiment has rows, what they say and a figure; acceptance is counted place by place."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import shutil
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from membound.app import experiments, tasks
from membound.app.answering import digest_of
from membound.app.commands import calibration
from membound.app.commands.root import app
from membound.app.experiments import EXPERIMENTS, PREDICTED, recorded, run
from membound.app.experiments.acceptance import AcceptanceCount
from membound.app.experiments.finding import Ask, Axis, Chart, Finding
from membound.app.figures.experiments import experiment_figure
from membound.app.store import Store
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.simulator.scheduling.request import Outcome, Step, Work

SHIPPED = [name for name in EXPERIMENTS if recorded(name) is not None]


class Quiet:
    def progress(self, fraction: float, message: str = "") -> None: ...

    def event(self, kind: str, payload: Any) -> None: ...

    def check_cancelled(self) -> None: ...


@pytest.fixture(scope="module")
def stacking() -> Finding:
    return run("x5", Ask(Quiet(), get_hardware("H100-SXM5"), None, quick=True))


def test_where_gains_multiply_the_product_is_what_each_gains_alone(stacking: Finding) -> None:
    assert {(row["batch"], row["context"]) for row in stacking.rows} == {
        (1, 1024),
        (1, 65536),
        (128, 1024),
        (128, 65536),
    }
    for row in stacking.rows:
        assert row["product"] == pytest.approx(math.prod(row["alone"][name] for name in row["members"]))
        assert row["ratio"] == pytest.approx(row["together"] / row["product"])
        assert row["best_subset_gain"] >= row["together"] - 1e-12


def test_a_finding_that_cannot_be_kept_is_printed_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path / "file" / "home"))
    result = CliRunner().invoke(app, ["experiment", "x5", "--quick", "--json"])
    assert isinstance(result.exception, MemboundError) and "Cannot write to" in str(result.exception)
    assert json.loads(result.stdout)["rows"]


def test_the_table_the_document_and_the_page_hold_every_row(stacking: Finding, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["experiment", "x5", "--quick", "--json", "--out", str(tmp_path)])
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert (
        document["rows"]
        == json.loads(json.dumps(stacking.rows))
        == json.loads((tmp_path / "x5.json").read_text())["rows"]
    )
    table = list(csv.DictReader(io.StringIO((tmp_path / "x5.csv").read_text())))
    assert [float(row["ratio"]) for row in table] == [row["ratio"] for row in stacking.rows]
    page = (tmp_path / "x5.html").read_text()
    assert "<script src=" not in page and "Llama-3.1-8B on one H100-SXM5" in page
    assert all(html.escape(line) in page for line in stacking.says) and page.count("<tr>") == 1 + len(stacking.rows)


def test_a_line_for_each_value_and_none_for_what_is_unknown() -> None:
    rows = [{"x": 1, "y": 2.0, "of": "a"}, {"x": 2, "y": 3.0, "of": "a"}, {"x": 1, "y": None, "of": "b"}]
    finding = Finding("x0", "?", rows, Chart(Axis("x", "x"), Axis("y", "y"), ("of",)), [], [])
    figure = experiment_figure(finding)
    assert [(trace.name, list(trace.y)) for trace in figure.data] == [("a", [2.0, 3.0])]


def step_of(*work: Work) -> Step:
    return Step(len(work), 0, (), work, (), (), (), 0, 0, 0, 0, 1, 1, (0.0,) * 9)


def test_acceptance_is_counted_where_a_place_was_reached() -> None:
    found = AcceptanceCount({0: "code", 1: "chat"})
    found(step_of(Work(0, 9, 4, (5, 6, 7)), Work(1, 9, 3, (5, 6))), Outcome(0.1, {0: (5, 6, 1), 1: (2,)}), 1.0)
    found(step_of(Work(0, 12, 1), Work(1, 10, 3, (5, 6))), Outcome(0.1, {0: (3,), 1: (5, 6, 8)}), 2.0)
    assert found.places("code") == [1.0, 1.0, 0.0]
    assert found.places("chat") == [0.5, 1.0]
    assert found.places() == [2 / 3, 1.0, 0.0]
    assert found.tokens_per_step("code") == 2.0 and found.tokens_per_step() == 8 / 4


def test_a_tree_counts_by_its_depth_and_a_prompt_not_at_all() -> None:
    found = AcceptanceCount()
    tree = Work(0, 9, 5, (1, 2, 3, 4), parents=(-1, -1, 0, 2))
    found(step_of(tree, Work(1, 0, 9)), Outcome(0.1, {0: (1, 3, 7), 1: (4,)}), 1.0)
    assert found.places() == [1.0, 1.0, 0.0] and found.tokens_per_step() == 3.0


def test_the_command_measures_with_the_engine_that_the_dashboard_measures_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads and the device of the calibration: another engine would be held against its prediction."""
    machine, asked = (get_hardware("H100-SXM5"), object()), []
    monkeypatch.setattr(calibration, "ensure_calibrated", lambda scenario: None)
    monkeypatch.setattr(tasks, "machine_for", lambda scenario: machine if scenario.name == "live-cpu" else None)
    monkeypatch.setattr(experiments, "run", lambda name, ask: asked.append(ask))
    CliRunner().invoke(app, ["experiment", "x1", "--quick"])
    (ask,) = asked
    assert (ask.hardware, ask.runtime) == machine == tasks.machine_of("x1")
    assert tasks.machine_of("x5")[1] is None


def test_an_experiment_that_measures_says_that_torch_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "calibration").mkdir()
    shutil.copy(Path(__file__).with_name("calibration.json"), tmp_path / "calibration" / "local.json")
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(app, ["experiment", "x1", "--quick"])
    assert isinstance(result.exception, MemboundError) and "torch is not installed" in str(result.exception)


def test_the_command_keeps_what_the_page_asks_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["experiment", "x5", "--quick", "--json"])
    (kept,) = Store(tmp_path).runs(kind="experiment", digest=digest_of("experiment", {"name": "x5", "quick": True}))
    assert kept.label == "x5" and kept.comparison() == json.loads(result.stdout)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_record_that_comes_with_membound_says_the_day_and_the_machine(name: str) -> None:
    """Its page shows it before anybody has run the experiment."""
    finding = recorded(name)
    assert finding is not None and finding.name == name and finding.rows and finding.says and finding.conditions
    assert date.fromisoformat(finding.made) and bool(finding.machine) == (name not in PREDICTED)
    assert experiment_figure(finding).data


def test_an_experiment_that_nobody_knows_is_refused_and_all_are_there() -> None:
    assert set(EXPERIMENTS) == {"x1", "x2", "x3", "x4", "x5"} and set(PREDICTED) < set(EXPERIMENTS)
    assert CliRunner().invoke(app, ["experiment", "x9"]).exit_code == 2
