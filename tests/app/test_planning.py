"""Do the commands that decide print one document, tables that say what they mean, and one sentence for bad input?"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import yaml

from membound.app import cli

ASKED = {
    "name": "asked",
    "model": "Llama-3.1-8B",
    "hardware": "H100-SXM5",
    "techniques": [{"name": "weight_quantization"}, {"name": "continuous_batching"}, {"name": "eagle"}],
    "workload": {
        "arrivals": {"kind": "closed_loop", "concurrency": 4},
        "requests": 16,
        "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 128}},
        "output_tokens": {"kind": "fixed", "tokens": 32},
    },
    "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
}


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def membound(*arguments: str) -> Result:
    """The command in this process, which has imported it already."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["membound", *arguments]),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    return Result(ended.value.code or 0, out.getvalue(), err.getvalue())


@pytest.fixture
def asked(tmp_path: Path) -> str:
    path = tmp_path / "asked.yaml"
    path.write_text(yaml.safe_dump(ASKED))
    return str(path)


def document(*arguments: str) -> dict[str, Any]:
    result = membound(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def shown(*arguments: str) -> str:
    result = membound(*arguments)
    assert result.returncode == 0, result.stderr
    return " ".join(result.stdout.split())


def refused(*arguments: str) -> str:
    result = membound(*arguments)
    assert result.returncode == 2 and result.stdout == "", result.stderr
    assert "Traceback" not in result.stderr
    (sentence,) = [line for line in result.stderr.splitlines() if line.strip()]
    return sentence


def test_stack(asked: str) -> None:
    found = document("stack", asked, "--batch", "1,64", "--context", "512")
    assert [stack["point"] for stack in found["stacks"]] == [{"batch": b, "context": 512} for b in (1, 64)]
    words = shown(
        "stack", asked, "--batch", "1", "--techniques", "weight_quantization,w8a8,eagle", "--metric", "tpot_s"
    )
    for part in ("each alone", "refused", "the product of the single gains would be", "multiply to the real gain"):
        assert part in words


def test_advise(asked: str) -> None:
    found = document("advise", asked)
    assert found["bottleneck"] == "memory_weights" and found["moves"] and found["rules"]
    words = shown("advise", asked)
    assert "moves by gain" in words and "rule R0" in words and "(has it)" in words


def test_plan_with_and_without_an_answer(asked: str) -> None:
    found = document(
        "plan", asked, "--devices", "H100-SXM5,L4", "--precision", "given", "--jobs", "1", "--confirm", "1"
    )
    assert {"device", "gpus", "deployment", "summary", "cost_usd_per_million_tokens"} <= set(found["best"])
    assert found["front"] and found["best"]["summary"]["completed"] > 0
    tight = (
        "plan",
        asked,
        "--jobs",
        "1",
        "--set",
        "slo.tpot_s=0.00001",
        "--devices",
        "H100-SXM5",
        "--precision",
        "given",
    )
    assert document(*tight)["best"] is None
    assert "no answer: nothing in precision 'given' meets the objective; nearest is" in shown(*tight)
    assert "front of precision" in shown("plan", asked, "--devices", "H100-SXM5", "--confirm", "0")


def test_the_most_that_a_deployment_serves(asked: str) -> None:
    opened = "workload.arrivals={kind: poisson, rate_rps: 100}"
    plain = "techniques=[{name: continuous_batching}]"
    found = document("plan", asked, "--max-rate", "--set", opened, "--set", plain, "--set", "workload.requests=100")
    assert found["max_rate_rps"] > 0 and found["summary"]["tpot_s"]["p99"] <= 0.05


def test_sweep_writes_every_point(asked: str, tmp_path: Path) -> None:
    table = tmp_path / "points.csv"
    axes = ("--jobs", "1", "--over", "workload.arrivals.concurrency=1,2", "--over", "hardware=H100-SXM5,nothing")
    found = document("sweep", asked, *axes, "--csv", str(table), "--set", "techniques=[]")
    reasons = [point["reason"] for point in found["points"]]
    assert [reason is None for reason in reasons] == [True, False, True, False] and "nothing" in reasons[1]
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 and float(rows[0]["tpot_s.p99"]) > 0 and "unknown" in rows[1]["reason"]
    assert "refused: hardware 'nothing'" in shown("sweep", asked, *axes, "--closed-form")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("stack", "--batch", "1,x"), "option --batch is '1,x'"),
        (("stack", "--context", "0"), "option --context is '0'"),
        (("stack", "--techniques", "magic"), "technique 'magic' is unknown"),
        (("stack", "--metric", "speed"), "option --metric is 'speed'"),
        (("stack", "--set", "techniques=[]"), "names no techniques to stack"),
        (("stack", "--backend", "slurm"), "option --backend is 'slurm'"),
        (("advise", "--hardware", "H1000"), "hardware 'H1000' is unknown"),
        (("plan", "--objective", "beauty"), "option --objective is 'beauty'"),
        (("plan", "--set", "slo={}"), "field 'slo' is empty"),
        (("plan", "--max-rate"), "needs open arrivals"),
        (("sweep", "--over", "x"), "option --over is 'x'"),
        (("sweep", "--over", "colour=1"), "'colour' is not in the scenario"),
        (("sweep", "--over", "temperature=0", "--csv", "/nowhere/out.csv"), "cannot be written"),
        (("sweep", "--over", "temperature=0,1", "--jobs", "0"), "jobs is 0"),
    ],
)
def test_bad_input_is_one_sentence(asked: str, arguments: tuple[str, ...], said: str) -> None:
    assert said in refused(arguments[0], asked, *arguments[1:])
