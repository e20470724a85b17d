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
from membound.roofline.techniques import Eagle

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
    assert found["bottleneck"] == found["now"]["bottleneck"] and found["moves"] and found["rules"]
    words = shown("advise", asked)
    assert "moves by gain" in words and "rule R0" in words and "(has it)" in words
    best = max(
        (one for one in found["moves"] if one["state"] != "on" and not one["price"] and not one["quality"]["heavy"]),
        key=lambda one: one["gain"] or 0.0,
    )
    assert f"first: {best['title']}, {best['gain']:.2f}×" in words
    assert words.index("first: ") < words.index("moves by gain")


@pytest.mark.parametrize(
    ("profile", "size", "asks"), [("vllm", (4, 16), True), ("vllm", (4, 4), False), ("sglang", (4, 16), False)]
)
def test_a_tree_that_vllm_has_if_asked_says_so(asked: str, profile: str, size: tuple[int, int], asks: bool) -> None:
    given = f"techniques=[continuous_batching, {{name: eagle, depth: {size[0]}, tree_size: {size[1]}}}]"
    words = shown("stack", asked, "--set", given, "--set", f"engine.profile={profile}")
    assert ("speculative_token_tree" in words) == asks


def test_advice_forbids_no_pair_that_gains_more_than_either_alone(asked: str) -> None:
    found = document("advise", asked, "--set", "techniques=[continuous_batching]")
    gains = {one["move"]: one["gain"] for one in found["moves"]}
    pairs = [one for one in found["do_not_combine"] if one["real"] is not None]
    assert pairs
    for one in pairs:
        assert one["slower"] == (one["real"] < max(gains[name] for name in one["moves"]))
    words = shown("advise", asked, "--set", "techniques=[continuous_batching]")
    for one in pairs:
        assert (f"not both: {' and '.join(one['moves'])}: " in words) == one["slower"]


def test_advise_at_a_batch_and_a_context_says_which_metric_and_speaks_plainly(asked: str) -> None:
    found = document("advise", asked, "--batch", "64", "--context", "2048", "--set", "engine.max_num_seqs=64")
    assert found["situation"]["batch"] == 64 and "64 requests under way" in found["conditions"]
    assert found["metric"] == "tpot_s" and "no request waits" in found["metric_reason"]
    assert document("advise", asked, "--metric", "output_tokens_per_s")["metric_reason"] == "as asked for"
    words = shown("advise", asked, "--batch", "64")
    assert "gains below are of TPOT: no request waits" in words
    assert not any(symbols in words for symbols in ("t_w", "(g + 1)", "a <= c"))


def test_a_stack_of_one_has_nothing_to_add_up_and_says_what_it_left_out(asked: str) -> None:
    words = shown("stack", asked, "--techniques", "weight_quantization:int8")
    assert "weight_quantization (int8" in words and "prompts take" in words and "of the time)" in words
    assert "keeps continuous_batching" in words and "without eagle of the scenario" in words and "by tpot_s" in words
    assert "each alone" in words and "in the given order" not in words and "product" not in words


def test_advice_is_read_without_looking_parameters_up(asked: str) -> None:
    words = shown("advise", asked, "--hardware", "A100-SXM4-80GB", "--set", "workload.prompts.tokens.tokens=2000")
    assert "True" not in words and "False" not in words and "membound compare" not in words
    assert "a device" in words and "prompts among it" in words


def test_a_kernel_that_the_device_was_not_measured_with_is_inferred(asked: str) -> None:
    """Tables of the A100 know bf16 products; fp8 weights are unpacked there."""
    eight = ("--hardware", "A100-SXM4-80GB", "--set", "techniques=[{name: w8a8, format: fp8}]")
    words = shown("predict", asked, *eight)
    assert "inferred from bf16" in words and "no matrix unit for fp8" in words
    assert "inferred from bf16" not in shown("predict", asked, *eight[:2], "--set", "techniques=[]")
    assert "no matrix unit for fp8" in shown("stack", asked, *eight)


def test_a_row_of_speculation_prints_what_it_was_costed_with(asked: str) -> None:
    words = shown("stack", asked, "--techniques", "eagle,kv_quantization", "--batch", "4")
    for part in (
        "depth",
        "tree_size",
        "(the best here",
        "alpha 0.78",
        "counted by others for Llama-3.1-8B: vLLM issue",
        "tokens a step (±",
        "kv_quantization (fp8)",
    ):
        assert part in words
    given = "techniques=[{name: draft_model_speculation, gamma: 2}, kv_quantization]"
    words = shown("stack", asked, "--set", given, "--set", "workload.task=chat")
    assert "gamma 2 (as given), draft model Llama-3.2-1B" in words and "task profile 'chat'" in words


def test_a_run_that_serves_nothing_says_why_first_and_what_to_change(asked: str) -> None:
    result = membound("simulate", asked, "--set", "engine.max_batched_tokens=64")
    words = " ".join(result.stdout.split())
    assert result.returncode == 2
    assert words.startswith("asked: no request was served requests were turned away; request 0, because 160 tokens")
    assert "raise engine.max_batched_tokens" in words and "idle" not in words
    short = ("--techniques", "kv_quantization", "--set", "engine.max_batched_tokens=64", "--json")
    for way in (("--simulate", "--jobs", "1"), ()):
        result = membound("stack", asked, *way, *short)
        (stack,) = json.loads(result.stdout)["stacks"]
        assert result.returncode == 2 and "exceed max_batched_tokens" in stack["reason"]


def test_a_run_says_which_drafts_it_took_where_the_scenario_leaves_them_open(asked: str) -> None:
    assert "eagle: depth" in (words := shown("simulate", asked)) and "(the best here" in words
    given = shown("simulate", asked, "--set", "techniques=[{name: eagle, depth: 2, tree_size: 2}]")
    assert "eagle: depth 2, tree_size 2 (as given)" in given


def test_catalogs_list_what_a_scenario_can_name() -> None:
    eagle = next(one for one in document("catalog", "techniques")["techniques"] if one["name"] == "eagle")
    assert {one["name"] for one in eagle["parameters"]} == set(Eagle.model_fields) - {"name"}
    assert eagle["best_if_not_given"] == ["depth", "tree_size"]
    assert {"vllm", "sglang"} <= {one["name"] for one in document("catalog", "profiles")["profiles"]}
    assert "H100-SXM5" in {one["name"] for one in document("catalog", "devices")["devices"]}
    assert "Llama-3.1-8B" in {one["name"] for one in document("catalog", "models")["models"]}
    words = shown("catalog", "techniques")
    assert "eagle" in words and "depth (the best)" in words
    for kind in ("profiles", "devices", "models"):
        assert shown("catalog", kind)
    assert "catalog 'x' is unknown; there are techniques, profiles" in refused("catalog", "x")


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_scenario_of_the_readme_is_answered(name: str, tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / name).read_text("utf-8")
    path = tmp_path / "my.yaml"
    path.write_text(readme.split("```yaml\n")[1].split("```")[0], "utf-8")
    found = document("advise", str(path), "--batch", "8", "--context", "4096")
    eagle = next(move for move in found["moves"] if move["move"] == "eagle")
    assert eagle["state"] == "on" and eagle["drafting"]["chosen"]


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
    words = shown("plan", asked, "--devices", "H100-SXM5,RTX-PRO-6000-Blackwell-Server", "--confirm", "0")
    assert "front of precision" in words and "…" not in words
    assert "measured on it" in words and "$/h each (" in words and "times ±" in words
    assert "up to" in words and "by closed form" in words and "engine profile 'graphs'" in words
    words = shown("plan", asked, "--devices", "H100-SXM5", "--precision", "given", "--confirm", "1", "--jobs", "1")
    assert "the objective with all times" in words and "closed forms alone would take" in words


def test_the_most_that_a_deployment_serves(asked: str) -> None:
    opened = "workload.arrivals={kind: poisson, rate_rps: 100}"
    plain = "techniques=[{name: continuous_batching}]"
    few = ("--set", "workload.requests=100", "--set", "engine.max_num_seqs=16")  # all at once would be served too
    found = document("plan", asked, "--max-rate", "--set", opened, "--set", plain, *few)
    assert found["max_rate_rps"] > 0 and found["summary"]["tpot_s"]["p99"] <= 0.05


def test_sweep_writes_every_point(asked: str, tmp_path: Path) -> None:
    table = tmp_path / "points.csv"
    axes = ("--jobs", "1", "--over", "workload.arrivals.concurrency=1,2", "--over", "parallel.tp=1,3")
    found = document("sweep", asked, *axes, "--csv", str(table), "--set", "techniques=[]")
    reasons = [point["reason"] for point in found["points"]]
    assert [reason is None for reason in reasons] == [True, False, True, False] and "tp is 3" in reasons[1]
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 and float(rows[0]["tpot_s.p99"]) > 0 and "tp is 3" in rows[1]["reason"]
    words = shown("sweep", asked, *axes, "--closed-form")
    assert words.count("refused: tp is 3") == 1 and "(2 of 4 points)" in " ".join(words.split())


def test_a_table_is_what_its_name_says(asked: str, tmp_path: Path) -> None:
    from pyarrow import parquet

    axes = ("--jobs", "1", "--closed-form", "--over", "parallel.tp=1,3", "--set", "techniques=[]")
    for name in ("points.csv", "points.parquet"):
        shown("sweep", asked, *axes, "--csv", str(tmp_path / name))
    columns = parquet.read_table(tmp_path / "points.parquet").to_pydict()
    with (tmp_path / "points.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [*rows[0]] == [*columns] and columns["parallel.tp"] == [1, 3]
    assert float(rows[0]["tpot_s"]) == columns["tpot_s"][0] and columns["tpot_s"][1] is None
    assert "ends in .csv or .parquet" in refused("sweep", asked, *axes, "--csv", str(tmp_path / "points.txt"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("stack", "--batch", "1,x"), "option --batch is '1,x'"),
        (("stack", "--context", "0"), "option --context is '0'"),
        (("stack", "--techniques", "magic"), "technique 'magic' is unknown"),
        (("stack", "--techniques", "prefix_cache"), "--set 'engine.prefix_caching=true'"),
        (("stack", "--metric", "speed"), "option --metric is 'speed'"),
        (("stack", "--set", "techniques=[]"), "names no techniques to stack"),
        (("stack", "--backend", "slurm"), "option --backend is 'slurm'"),
        (("advise", "--hardware", "H1000"), "hardware 'H1000' is unknown"),
        (("plan", "--objective", "beauty"), "option --objective is 'beauty'"),
        (("plan", "--set", "slo={}"), "field 'slo' is empty"),
        (("plan", "--max-rate"), "needs open arrivals"),
        (("sweep", "--over", "x"), "option --over is 'x'"),
        (("sweep", "--over", "colour=1"), "'colour' is not in the scenario"),
        (("sweep", "--over", "temperature=0", "--csv", "/nowhere/out.csv"), "whose folder does not exist"),
        (("sweep", "--over", "temperature=0,1", "--jobs", "0"), "jobs is 0"),
    ],
)
def test_bad_input_is_one_sentence(asked: str, arguments: tuple[str, ...], said: str) -> None:
    assert said in refused(arguments[0], asked, *arguments[1:])


@pytest.mark.parametrize("command", ["simulate", "stack", "advise", "predict"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("parallel={tp: 2, ep: 2}", "parallel.ep is 2"),
        ("parallel.pp=33", "parallel.pp is 33"),
        ("workload.requests=true", "workload.requests"),
    ],
)
def test_every_command_refuses_what_cannot_be(asked: str, command: str, given: str, said: str) -> None:
    assert said in refused(command, asked, "--set", given)


@pytest.mark.parametrize(
    ("technique", "said"),
    [("{name: draft_model_speculation, draft: nope}", "model 'nope'"), ("mtp", "multi-token prediction")],
)
def test_a_drafter_that_the_model_cannot_have_is_never_simulated(asked: str, technique: str, said: str) -> None:
    assert said in refused("simulate", asked, "--set", f"techniques=[{technique}]")


def test_requests_longer_than_the_context_are_not_served(asked: str) -> None:
    longer = ("--set", "workload.output_tokens.tokens=200000")
    for command in ("stack", "advise", "simulate"):
        assert "more than the 131072 tokens" in refused(command, asked, *longer)


def test_a_key_that_stands_twice_is_refused(asked: str) -> None:
    Path(asked).write_text(Path(asked).read_text() + "model: Llama-2-7B\n")
    assert "'model' twice" in refused("predict", asked)


def test_no_output_replaces_its_input(asked: str, tmp_path: Path) -> None:
    before = Path(asked).read_text()
    link = tmp_path / "link.csv"
    link.hardlink_to(asked)
    assert "ends in .csv" in refused("sweep", asked, "--over", "parallel.tp=1,2", "--csv", asked)
    for command in (("sweep", "--over", "parallel.tp=1,2", "--csv"), ("simulate", "--timeline")):
        assert "give another file" in refused(command[0], asked, *command[1:], str(link))
    assert Path(asked).read_text() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["stack", "plan-70b", "--backend", "dask"], "--backend is 'dask', but closed forms run here"),
        (["advise", "plan-70b", "--jobs", "4"], "--jobs is '4', but closed forms run here"),
        (["plan", "plan-70b", "--max-rate", "--objective", "devices"], "--objective is 'devices', but --max-rate"),
        (["plan", "plan-70b", "--max-rate", "--precision", "8bit"], "--precision is '8bit', but --max-rate"),
        (["plan", "plan-70b", "--max-rate", "--confirm", "0"], "--confirm is '0', but --max-rate"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(arguments: list[str], said: str) -> None:
    assert said in refused(*arguments)


def test_a_step_is_asked_about_at_the_load_of_the_scenario_unless_a_batch_or_context_is_given(membound, asked) -> None:
    def point(*given: str) -> dict[str, Any]:
        return json.loads(membound("predict", asked, "--json", *given)[1])["point"]

    loop = (
        "--set",
        "workload.arrivals={kind: closed_loop, concurrency: 3}",
        "--set",
        "techniques=[continuous_batching]",
    )
    usual = point(*loop)
    assert usual["batch"] == 3 and usual["context"] > 1
    assert point(*loop, "--batch", "7") == usual | {"batch": 7}
    assert point(*loop, "--batch", "7", "--context", "99") == usual | {"batch": 7, "context": 99}
    prompt = point(*loop, "--phase", "prefill")
    assert prompt["batch"] == 1 and prompt["context"] < usual["context"]
    assert "the scenario's own load" in " ".join(membound("predict", asked, *loop)[1].split())


def test_a_row_with_more_sequences_than_fit_says_how_many_decode_at_once(membound, asked) -> None:
    over = ("--over", "batch=1,4000", "--set", "model=Llama-3.1-8B", "--set", "techniques=[continuous_batching]")
    found = json.loads(membound("sweep", asked, *over, "--closed-form", "--json")[1])["points"]
    assert found[0]["summary"]["batch"] == 1 and found[1]["summary"]["batch"] < 4000
    words = membound("sweep", asked, *over, "--closed-form")[1]
    assert f"{found[1]['summary']['batch']:.0f}" in words and "at 1 of 2 points more sequences are under way" in words
    assert "at once" not in membound("sweep", asked, "--over", "batch=1,2", "--closed-form")[1]


def test_a_simulated_sweep_shows_the_gaps_between_tokens_that_chunks_change(membound, asked) -> None:
    assert "ITL p50 (p99)" in membound("sweep", asked, "--over", "engine.max_batched_tokens=2048,4096")[1]
