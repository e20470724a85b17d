"""`membound kernels`: one document, exit code 1 for a kernel that is off, one sentence where there is no GPU."""

from __future__ import annotations

import json
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from typer.testing import CliRunner  # noqa: E402

from membound.app.commands import kernels as commands  # noqa: E402
from membound.app.commands.root import app  # noqa: E402
from membound.kernels.bench import check as checking  # noqa: E402
from membound.kernels.bench.benchmark import Ceilings, Failed, Timed  # noqa: E402
from membound.roofline.errors import MemboundError  # noqa: E402

HAS_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(HAS_GPU, reason="on a GPU the kernels are compiled, not interpreted")


def run(*arguments):
    return CliRunner().invoke(app, ["kernels", *arguments])


def test_a_check_prints_one_document_and_writes_both_files(tmp_path):
    done = run("check", "--interpret", "--kernel", "silu_mul", "--seed", "5", "--out", str(tmp_path), "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["conditions"]["seed"] == 5 and document["conditions"]["wrong"] == 0
    assert {row["kernel"] for row in document["rows"]} == {"silu_mul"} and all(r["right"] for r in document["rows"])
    assert json.loads((tmp_path / "kernels-check-interpreter.json").read_text("utf-8")) == document
    assert "| silu_mul |" in (tmp_path / "kernels-check-interpreter.md").read_text("utf-8")


def test_one_kernel_that_is_off_is_exit_code_1(monkeypatch):
    found = [checking.Checked("a", "b", 0.5, 20.0), checking.Checked("c", "d", 0.0, 0.0)]
    monkeypatch.setattr(checking, "check", lambda *arguments: found)
    done = run("check", "--interpret", "--json")
    assert done.exit_code == 1
    assert [row["right"] for row in json.loads(done.stdout)["rows"]] == [False, True]


def test_without_a_gpu_there_is_one_sentence_that_says_what_can_be_done():
    for command in ("check", "bench"):
        error = run(command).exception
        assert isinstance(error, MemboundError)
        assert "finds no GPU" in str(error) and "`membound kernels check --interpret`" in str(error)


def test_bad_options_are_named():
    for arguments, message in (
        (("check", "--interpret", "--kernel", "nope"), "option --kernel is 'nope'; give one of block_copy, "),
        (
            ("resources", "--arch", "sm20"),
            "--arch is 'sm20'; give one of sm80, sm89, sm90, sm100, sm120, gfx942",
        ),
    ):
        error = run(*arguments).exception
        assert isinstance(error, MemboundError) and message in str(error)


def test_a_gpu_that_is_not_there_is_not_calibrated():
    error = CliRunner().invoke(app, ["calibrate", "--device", "cuda"]).exception
    assert isinstance(error, MemboundError)
    assert "option --device is 'cuda', but torch" in str(error) and "finds no GPU; give cpu" in str(error)


def test_resources_are_read_from_what_is_compiled(tmp_path):
    done = run("resources", "--arch", "sm80", "--kernel", "silu_mul", "--out", str(tmp_path), "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert {row["arch"] for row in rows} == {"sm80"} and all(row["registers"] > 0 for row in rows)
    assert (tmp_path / "kernels-resources-sm80.md").exists()


def test_rows_are_kept_in_their_order_whenever_one_is_done():
    """What was found before a machine is taken away, or a person stops waiting, is on the disk."""
    rows = {n: checking.Checked("k", str(n), 0.0, 0.0) for n in (7, 2, 5)}
    kept: list[list[str]] = []
    found = commands._gathered(
        iter(rows.items()), [2, 5, 7], lambda *_: None, lambda rows: kept.append([row.case for row in rows])
    )
    assert kept == [["7"], ["2", "7"], ["2", "5", "7"]] and [row.case for row in found] == kept[-1]


def test_a_case_that_does_not_compile_is_a_row_and_an_exit_code(monkeypatch, tmp_path):
    import membound.kernels.bench.resources as compiling

    command = [sys.executable, "-c", "raise SystemExit('ptxas: no')"]
    monkeypatch.setattr(compiling, "command_of", lambda arch, case: command)
    done = run("resources", "--kernel", "silu_mul", "--out", str(tmp_path), "--json")
    assert done.exit_code == 1, done.output
    document = json.loads(done.stdout)
    assert document["conditions"]["not compiled"] == len(document["rows"]) > 0
    assert "does not compile for sm90: ptxas: no" in (tmp_path / "kernels-resources-sm90.md").read_text("utf-8")


def test_a_time_is_shown_with_its_shares_and_a_failure_with_its_reason():
    ceilings = Ceilings(4e12, {"bf16": 8e14})
    timed = Timed("k", "c", 1e-3, 5e-5, 2 * 10**9, 0, "bf16", 1, False, {"Marlin": "not installed", "SDPA": 2e-3})
    row = commands._timed_row(timed, ceilings)
    assert row["of copy"] == "50 %" and row["time"] == "1.00 ms" and row["±"] == "5 %"
    assert row["beside it"] == "Marlin not installed; SDPA 2.00 ms"
    failed = commands._timed_row(Failed("k", "c", "OutOfMemoryError: no room"), ceilings)
    assert failed["beside it"] == "OutOfMemoryError: no room" and failed.keys() == row.keys()
    assert commands._timed_json(timed, ceilings)["of_copy"] == pytest.approx(0.5)
