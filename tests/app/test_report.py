"""Do results read with their units, without objectives that nobody gave, and without powers of ten?"""

from __future__ import annotations

import io
import json
import re

import pytest

from membound.app.reports.comparison import _price
from membound.roofline.hardware import get_hardware

ASKED = """
name: asked
model: Llama-3.1-8B
hardware: H100-SXM5
workload:
  arrivals: {kind: closed_loop, concurrency: 8}
  requests: 16
  prompts: {kind: synthetic, tokens: {kind: fixed, tokens: 2048}}
  output_tokens: {kind: fixed, tokens: 32}
"""


@pytest.fixture
def asked(tmp_path) -> str:
    path = tmp_path / "asked.yaml"
    path.write_text(ASKED)
    return str(path)


def test_energy_is_that_of_all_devices_at_their_board_power(membound, asked: str) -> None:
    for devices in (1, 2):
        _, out, _ = membound("simulate", asked, "--json", "--set", f"parallel.tp={devices}")
        found = json.loads(out)
        watts = get_hardware("H100-SXM5").power_w * devices
        per_token = watts / found["summary"]["output_tokens_per_s"]
        assert found["energy_j_per_token_at_board_power"] == pytest.approx(per_token)


def test_replicas_draw_power_for_the_hours_that_they_are_there(membound, asked: str) -> None:
    cluster = "cluster={router: round_robin, groups: [{count: 2}]}"
    _, out, _ = membound("simulate", asked, "--json", "--set", cluster)
    found = json.loads(out)
    hours = found["cluster"]["device_hours"]
    tokens = found["summary"]["output_tokens_per_s"] * found["summary"]["duration_s"]
    joules = get_hardware("H100-SXM5").power_w * hours * 3600
    assert found["energy_j_per_token_at_board_power"] == pytest.approx(joules / tokens)


def test_a_run_reads_without_powers_of_ten_and_without_an_objective_that_nobody_gave(membound, asked: str) -> None:
    _, out, _ = membound("simulate", asked)
    assert not re.search(r"\de[+-]\d", out)
    assert "goodput" not in out and "unknown" not in out
    words = " ".join(out.split())
    assert "H100-SXM5: " in words and "times of steps are within ±" in words
    _, out, _ = membound("simulate", asked, "--set", "slo.ttft_s=10")
    assert "goodput" in out and "100.0% within TTFT 10.0 s; bound by" in " ".join(out.split())


def test_a_run_begins_with_what_it_comes_to_and_an_overload_is_said_before_any_number(membound, asked: str) -> None:
    _, out, _ = membound("simulate", asked, "--set", "workload.requests=200")
    assert re.match(r"200 of 200 requests served: [\d,.]+ output tok/s, TTFT .*; bound by", " ".join(out.split()))
    assert "overloaded" not in out
    flood = ("--set", "workload.arrivals={kind: poisson, rate_rps: 2000}", "--set", "workload.requests=3000")
    _, out, _ = membound("simulate", asked, *flood, "--set", "engine.max_num_seqs=16")
    said, table = " ".join(out.split()).split("metric", 1)
    assert re.search(r"overloaded: \d+ of 3000 requests still waited", said) and "overloaded" not in table


def test_a_step_of_several_devices_says_the_rate_of_one(membound, asked: str) -> None:
    _, out, _ = membound("predict", asked, "--batch", "64", "--set", "parallel.tp=4")
    total, each = re.search(r"([\d,.]+) tok/s \(([\d,.]+) tok/s a device\)", " ".join(out.split())).groups()
    assert float(total.replace(",", "")) == pytest.approx(4 * float(each.replace(",", "")), rel=0.01)
    assert "a device" not in membound("predict", asked)[1]


def test_every_profile_says_what_it_is_of_and_no_more_digits_than_a_fit_has(membound) -> None:
    _, out, _ = membound("catalog", "profiles", "--json")
    listed = json.loads(out)["profiles"]
    assert all(one["description"] for one in listed)
    said = membound("catalog", "profiles")[1]
    assert " ns" not in said and "0.0000" not in said
    for digits in re.findall(r"([\d,]+) µs", said):
        assert len(digits.replace(",", "").rstrip("0")) <= 2


@pytest.mark.parametrize("width", [80, 100, 170])
def test_a_sweep_shows_what_was_swept_and_every_metric_whole_at_any_width(width: int) -> None:
    from rich.console import Console

    from membound.app.reports.sweep import sweep

    slow = {"p50": 0.123, "p99": 0.456}
    summary = {"output_tokens_per_s": 12345.0, "requests_per_s": 12.3, "ttft_s": slow, "tpot_s": slow}
    summary |= {"goodput_rps": 11.2, "acceptance_rate": 0.7, "bottleneck_share": {"memory_weights": 0.8}}
    names = ("RTX-PRO-6000-Blackwell-Server", "H100-SXM5")
    points = [
        {"values": {"hardware": name, "workload.arrivals.concurrency": users}, "summary": summary, "reason": None}
        for name in names
        for users in (8, 128)
    ]
    console = Console(width=width, record=True, file=io.StringIO())
    document = {"scenario": {"name": "asked", "slo": {"ttft_s": 1.0}}, "by": "simulation", "points": points}
    console.print(sweep(document | {"notes": []}))
    words = console.export_text()
    assert "…" not in words
    tables = [line for line in words.splitlines() if line.startswith("hardware")]
    assert all("concurrency" in line for line in tables)
    for metric in ("tok/s", "req/s", "TTFT p50 (p99)", "TPOT p50 (p99)", "goodput", "acceptance", "bottleneck"):
        assert sum(metric in line for line in tables) == 1
    for value in ("12,345", "123 ms (456 ms)", "11.2", "0.700", "weights 80 %"):
        assert words.count(value) >= len(points)
    assert words.count("H100-SXM5") == 2 * len(tables)


def test_a_sweep_says_values_as_people_do_and_no_goodput_without_an_objective(membound, asked: str) -> None:
    over = ("--over", "parallel={tp: 1},{tp: 1, dp: 2}", "--closed-form")
    _, out, _ = membound("sweep", asked, *over)
    assert "tp 1, dp 2" in out and "{" not in out and "goodput" not in out


def test_a_step_that_does_not_fit_says_so_first_with_what_would_hold_it(membound, asked: str) -> None:
    model = ("--set", "model=DeepSeek-V3", "--set", "parallel.tp=2")
    code, out, _ = membound("predict", asked, *model)
    assert code == 2 and out.startswith("DOES NOT FIT") and "decode step of DeepSeek-V3" in out
    memory = json.loads(membound("predict", asked, *model, "--json")[1])["memory"]
    degrees = re.findall(r"parallel\.\w+ \d+", memory["remedy"])
    held = membound("predict", asked, *model, *(word for one in degrees for word in ("--set", one.replace(" ", "="))))
    assert degrees and held[0] == 0 and "DOES NOT FIT" not in held[1]
    assert degrees == re.findall(r"parallel\.\w+ \d+", membound("simulate", asked, *model)[2])


def test_a_batch_that_does_not_fit_is_answered_with_the_largest_that_does(membound, asked: str) -> None:
    memory = json.loads(membound("predict", asked, "--batch", "9000", "--json")[1])["memory"]
    most = memory["largest_batch"]
    assert f"a batch of at most {most:,}" in memory["remedy"]
    assert [membound("predict", asked, "--batch", str(batch))[0] for batch in (most, most + 1)] == [0, 2]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_what_reads_no_weights_is_not_bound_by_them(membound, asked: str, phase: str) -> None:
    at = ("--phase", phase, "--batch", "8", "--context", "2048")
    found = json.loads(membound("predict", asked, *at, "--json")[1])
    bounds = {op["name"]: op["bound"] for op in found["operators"]}
    for op in found["operators"]:
        assert op["bound"] != "memory_weights" or op["weight_bytes"] >= op["activation_bytes"]
        assert op["bound"] != "memory_activations" or op["activation_bytes"] > op["weight_bytes"]
    if phase == "prefill":
        assert bounds["silu_mul"] == "memory_activations"
        assert re.search(r"silu_mul .*activations", membound("predict", asked, *at)[1])
    else:
        assert "memory_weights" in bounds.values()


@pytest.mark.parametrize(("metric", "said"), [("tpot_s", "TPOT"), ("output_tokens_per_s", "tokens/s")])
def test_a_stack_says_first_of_what_its_gains_are_and_against_what(
    membound, asked: str, metric: str, said: str
) -> None:
    _, out, _ = membound("stack", asked, "--techniques", "eagle,w8a8", "--metric", metric)
    assert out.startswith(f"gains in {said} against the plain engine")


def test_a_config_is_called_by_its_folder_wherever_it_is_named(membound, tmp_path) -> None:
    (tmp_path / "mine").mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 16, "vocab_size": 32000,
        "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config))
    scenario = tmp_path / "own.yaml"
    scenario.write_text(ASKED.replace("Llama-3.1-8B", str(tmp_path / "mine" / "config.json")))
    stacked = ("--techniques", "w8a8")
    for command, options in (("predict", ()), ("advise", ()), ("stack", stacked)):
        _, out, _ = membound(command, str(scenario), *options)
        words = " ".join(out.split())
        assert " mine," in words or "mine on H100-SXM5" in words, command
        assert "config.json" not in words, command


@pytest.mark.parametrize(("context", "said"), [(2048, "KL 0 nats"), (512, "not exceeded"), (None, "KL 0 nats")])
def test_a_budget_that_nothing_exceeded_has_no_price_of_zero(context: int | None, said: str) -> None:
    quality = {"kl_nats": 0.0, "top1_agreement": 1.0, "context": context, "budget": 512}
    price = _price({"lossless": False, "quality": quality})
    assert said in price and ("nats" in price) != ("not exceeded" in price)
