"""Are membound, its peers and the measurements compared on the same cases, and is membound the nearer one?"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from membound.roofline.errors import MemboundError
from membound.roofline.validation import peers, ratios
from membound.roofline.validation.operations import Measurement, read_measurements
from membound.roofline.validation.peers import ALL, Comparison, PeerPrediction, beside, compare, nearness, read_peers
from membound.roofline.validation.ratios import NO_SIGN, Ratio
from membound.roofline.validation.report import validate_table
from membound.roofline.validation.tables import END_TO_END_COLUMNS, OPERATOR_COLUMNS

FACTS = Path(__file__).parents[3] / "shared" / "facts"
needs_facts = pytest.mark.skipif(not FACTS.is_dir(), reason="../shared/facts, the peers' predictions, is not here")

DECODE = {
    "tool": "abacus",
    "gpu": "H100-SXM",
    "model": "llama-3.1-8b",
    "wdtype": "fp16",
    "kvdtype": "fp16",
    "tp": 1,
    "batch": 8,
    "input_len": "",
    "context_len": 512,
    "phase": "decode",
    "value": 5.0,
}
PREFILL = DECODE | {"phase": "prefill", "input_len": 2048, "context_len": 2048, "batch": 1, "value": 40.0}
RUN = {
    "source": "lab",
    "engine": "vllm",
    "engine_version": "0.11",
    "gpu": "H100-SXM5",
    "n_gpu": 1,
    "tp": 1,
    "pp": 1,
    "model": "Llama-3.1-8B",
    "weight_dtype": "bf16",
    "act_dtype": "bf16",
    "kv_dtype": "bf16",
    "trust": "A",
    "batch_or_concurrency": 8,
    "input_len": 448,
    "output_len": 127,
    "metric": "tpot_ms",
    "value": 7.0,
}


def write(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def predicted(folder: Path, *rows: Mapping[str, object]) -> list[PeerPrediction]:
    return read_peers(write(folder / "peers.csv", peers.COLUMNS, [{**DECODE, **row} for row in rows]))


def measured(folder: Path, cases: Sequence[PeerPrediction], *rows: Mapping[str, object]) -> list[Measurement]:
    path = write(folder / "runs.csv", END_TO_END_COLUMNS, [{**RUN, **row} for row in rows])
    return read_measurements(path, [case.operation for case in cases])


def compared(folder: Path, case: Mapping[str, object], run: Mapping[str, object]) -> list[Comparison]:
    cases = predicted(folder, case)
    return compare(cases, measured(folder, cases, run))


def test_a_measurement_of_the_same_step_is_put_beside_it(tmp_path: Path) -> None:
    (pair,) = compared(tmp_path, {}, {})
    assert pair.kind == "decode"
    assert pair.measurement.ms == 7.0 and pair.peer_error == pytest.approx(5.0 / 7.0 - 1.0)
    assert pair.error == pytest.approx(pair.peer.operation.ms / 7.0 - 1.0)


@pytest.mark.parametrize(
    "run",
    [
        {"gpu": "H200-SXM"},
        {"model": "Qwen3-8B"},
        {"tp": 2, "n_gpu": 2},
        {"n_gpu": 4},
        {"weight_dtype": "int8"},
        {"weight_dtype": "fp8", "act_dtype": "fp8"},
        {"kv_dtype": "fp8"},
        {"batch_or_concurrency": 16},
        {"input_len": 16384},
        {"metric": "prefill_ms"},
        {"metric": "e2e_latency_ms"},
        {"flags": "suspect"},
        {"flags": "online_interleaved_prefill"},
        {"trust": "C"},
        {"technique": "speculative decoding"},
        {"value": 0.1},
        {"model": "no such model"},
    ],
)
def test_a_measurement_of_another_step_is_not(tmp_path: Path, run: Mapping[str, object]) -> None:
    assert compared(tmp_path, {}, run) == []


@pytest.mark.parametrize(
    ("run", "ms"),
    [
        ({"metric": "decode_tok_s_per_user", "value": 125.0}, 8.0),
        ({"metric": "decode_tok_s_total", "value": 1000.0}, 8.0),
        ({"metric": "throughput_tok_s_total", "value": 1000.0, "input_len": 1, "output_len": 1000}, 8.0),
        ({"model": "Llama-3-8B"}, 7.0),
        ({"weight_dtype": "fp16", "act_dtype": "fp16", "kv_dtype": "fp16"}, 7.0),
    ],
)
def test_rates_and_models_of_the_same_shape_serve_as_well(tmp_path: Path, run: Mapping[str, object], ms: float) -> None:
    (pair,) = compared(tmp_path, {}, run)
    assert pair.measurement.ms == pytest.approx(ms)


def test_the_rate_of_a_run_less_its_first_token_is_that_of_its_steps(tmp_path: Path) -> None:
    """101 tokens in 1.02 s of which the first took 20 ms: 100 steps of 10 ms."""
    cases = predicted(tmp_path, {"batch": 1})
    load = {"batch_or_concurrency": 1, "input_len": 462, "output_len": 101}
    rate = {**load, "metric": "throughput_tok_s_total", "value": 101 / 1.02}
    first = {**load, "metric": "ttft_ms", "value": 20.0}
    steps = [m for m in measured(tmp_path, cases, rate, first) if m.operation.phase == "decode"]
    assert [m.ms for m in steps] == pytest.approx([10.0])
    assert measured(tmp_path, cases, rate) == []


def test_a_first_token_is_a_prefill_only_alone_and_of_the_same_length(tmp_path: Path) -> None:
    first = {"metric": "ttft_ms", "value": 40.0, "input_len": 2048, "batch_or_concurrency": 1}
    assert [pair.kind for pair in compared(tmp_path, PREFILL, first)] == ["prefill"]
    assert compared(tmp_path, PREFILL, {**first, "input_len": 1024}) == []
    assert compared(tmp_path, PREFILL | {"batch": 8}, {**first, "batch_or_concurrency": 8}) == []
    assert compared(tmp_path, PREFILL, {**first, "flags": "includes_queueing"}) == []


def test_a_power_cap_matters_to_prefill_and_not_to_decode(tmp_path: Path) -> None:
    capped = {"gpu": "A100-80GB-SXM(330W)", "batch_or_concurrency": 1, "value": 12.0}
    assert len(compared(tmp_path, {"gpu": "A100-80G-SXM", "batch": 1}, capped)) == 1
    capped |= {"metric": "prefill_ms", "input_len": 2048, "value": 200.0}
    assert compared(tmp_path, {**PREFILL, "gpu": "A100-80G-SXM"}, capped) == []


def test_a_case_takes_one_measurement_of_a_source_and_the_nearest(tmp_path: Path) -> None:
    cases = predicted(tmp_path, {})
    near, far, elsewhere = {"value": 7.0}, {"value": 6.9, "input_len": 480}, {"value": 6.8, "source": "other"}
    pairs = compare(cases, measured(tmp_path, cases, far, near, elsewhere))
    assert sorted(pair.measurement.ms for pair in pairs) == [6.8, 7.0]


def test_a_measurement_serves_one_case_of_a_tool_and_what_is_published_twice_counts_once(tmp_path: Path) -> None:
    cases = predicted(tmp_path, {"context_len": 500}, {}, {"tool": "other"})
    pairs = compare(cases, measured(tmp_path, cases, {}, {"engine_version": "0.12"}))
    assert [(pair.peer.tool, pair.peer.operation.tokens) for pair in pairs] == [("abacus", 512.0), ("other", 512.0)]


def test_what_a_tool_says_not_to_fit_is_not_held_against_it(tmp_path: Path) -> None:
    cases = predicted(tmp_path, {"tool": "abacus/OOM"}, {"value": 6.0})
    assert [(case.tool, case.fits) for case in cases] == [("abacus", False), ("abacus", True)]
    assert [pair.peer.ms for pair in compare(cases, measured(tmp_path, cases, {}))] == [6.0]
    assert [found.n for found in beside(cases)] == [1]


def test_nearer_is_nearer_in_ratio_and_the_engine_may_be_told(tmp_path: Path) -> None:
    cases = predicted(tmp_path, {})
    own = cases[0].operation.ms
    for times, nearer in ((0.5, True), (2.0, True), (1.0, False)):
        cases = predicted(tmp_path, {"value": 1.1 * own * times})
        (pair,) = compare(cases, measured(tmp_path, cases, {"value": 1.1 * own, "engine": "transformers"}))
        assert pair.membound_is_nearer is nearer
        assert pair.kind == "decode, launched from the host" and pair.told_error > pair.error
        (found, everything) = nearness([pair])
        assert (found.n, found.nearer, found.sources) == (1, int(nearer), 1) and everything.tool == ALL
        assert found.median == pytest.approx(1 - 1 / 1.1) and found.peer_median == pytest.approx(abs(times - 1))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"phase": "rest"}, "phase is 'rest'; it must be decode or prefill"),
        ({"value": "nan"}, "value is 'nan'"),
        ({"tp": ""}, "tp is ''"),
        ({"gpu": "H9000"}, "'H9000' is unknown"),
    ],
)
def test_a_table_of_peers_that_is_wrong_is_one_sentence(
    tmp_path: Path, change: Mapping[str, object], says: str
) -> None:
    with pytest.raises(MemboundError, match=says):
        predicted(tmp_path, {}, change)


def test_other_files_are_refused(tmp_path: Path) -> None:
    runs = write(tmp_path / "runs.csv", END_TO_END_COLUMNS, [RUN])
    operators = write(tmp_path / "ops.csv", OPERATOR_COLUMNS, [{"latency_us": 1.0}])
    with pytest.raises(MemboundError, match="lacks the columns tool, wdtype"):
        read_peers(runs)
    with pytest.raises(MemboundError, match="cannot be read"):
        read_peers(tmp_path / "none.csv")
    with pytest.raises(MemboundError, match="is of operators"):
        read_measurements(operators, [])
    with pytest.raises(MemboundError, match="is of operators"):
        ratios.ratios(validate_table(operators))
    for module in (peers, ratios):
        with pytest.raises(SystemExit, match=r"give (one|two) file"):
            module.main([])


def test_both_modules_print_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = write(tmp_path / "runs.csv", END_TO_END_COLUMNS, [RUN, RUN | {"weight_dtype": "int4", "value": 3.0}])
    peers.main([str(write(tmp_path / "peers.csv", peers.COLUMNS, [DECODE])), str(runs)])
    assert "| decode | abacus | 1 | 1 | 28.6% |" in capsys.readouterr().out
    ratios.main([str(runs)])
    assert "| weights | any | 1 | 1 | 100.0% |" in capsys.readouterr().out


# --- ratios that a table implies ---


def implied(folder: Path, *rows: Mapping[str, object]) -> list[Ratio]:
    return ratios.ratios(validate_table(write(folder / "runs.csv", END_TO_END_COLUMNS, [{**RUN, **r} for r in rows])))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"weight_dtype": "int4"}, "weights"),
        ({"weight_dtype": "fp8", "act_dtype": "fp8", "technique": "W8A8"}, "weights"),
        ({"kv_dtype": "fp8"}, "kv cache"),
        ({"tp": 2, "n_gpu": 2}, "tensor parallelism"),
    ],
)
def test_rows_that_differ_in_one_thing_make_a_ratio(tmp_path: Path, change: Mapping[str, object], kind: str) -> None:
    baseline = {"input_len": 8192, "value": 14.0}
    (found,) = implied(tmp_path, baseline, {**baseline, **change, "value": 10.0})
    assert found.kind == kind and found.measured == pytest.approx(1.4)
    assert found.predicted > 1.0 and found.sign_is_right and found.has_sign


def test_a_ratio_is_a_speed_whatever_the_metric(tmp_path: Path) -> None:
    rate = {"metric": "decode_tok_s_total"}
    (found,) = implied(tmp_path, {**rate, "value": 1000.0}, {**rate, "value": 1500.0, "weight_dtype": "int4"})
    (time,) = implied(tmp_path, {"value": 8.0}, {"value": 8.0 / 1.5, "weight_dtype": "int4"})
    assert found.measured == pytest.approx(time.measured) == pytest.approx(1.5)
    assert found.predicted == pytest.approx(time.predicted)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"weight_dtype": "int4", "kv_dtype": "fp8"},
        {"weight_dtype": "int4", "tp": 2, "n_gpu": 2},
        {"weight_dtype": "int4", "batch_or_concurrency": 16},
        {"weight_dtype": "int4", "source": "other"},
        {"weight_dtype": "int4", "engine_version": "0.12"},
        {"weight_dtype": "int4", "flags": "suspect"},
        {"weight_dtype": ""},
        {"tp": 2, "n_gpu": 8},
    ],
)
def test_rows_that_differ_in_nothing_or_in_more_do_not(tmp_path: Path, change: Mapping[str, object]) -> None:
    assert implied(tmp_path, {}, {**change, "value": 5.0}) == []


def test_every_row_is_set_against_the_widest_format_and_the_fewest_devices(tmp_path: Path) -> None:
    weights = implied(tmp_path, {"weight_dtype": "int4"}, {"weight_dtype": "int8"}, {}, {"weight_dtype": "int8"})
    assert [ratio.change for ratio in weights] == ["bf16 to int8", "bf16 to int8", "bf16 to int4"]
    devices = implied(tmp_path, *({"tp": tp, "n_gpu": tp} for tp in (4, 1, 2)))
    assert [ratio.change for ratio in devices] == ["1 to 2", "1 to 4"]


def test_a_measured_ratio_near_1_has_no_sign(tmp_path: Path) -> None:
    for times, signed in ((1.0, False), (1 + 0.9 * NO_SIGN, False), (1 + 1.1 * NO_SIGN, True), (0.9, True)):
        (found,) = implied(tmp_path, {}, {"weight_dtype": "int4", "value": 7.0 / times})
        assert found.has_sign is signed
        assert found.sign_is_right is (times > 1.0)


def test_stated_speed_ups_count_although_their_baseline_waits_for_the_host(tmp_path: Path) -> None:
    stated = {"metric": "speedup_x", "value": 2.0, "technique": "speculative decoding: EAGLE", "flags": "hf_baseline"}
    stated |= {"engine": "transformers", "batch_or_concurrency": 1, "notes": "mean accepted tokens 3.5"}
    (found,) = implied(tmp_path, {}, stated, {**stated, "flags": "suspect"}, {**stated, "trust": "C"})
    assert found.kind == "speculation" and found.measured == 2.0 and found.predicted > 1.0


# --- what is published ---


@pytest.fixture(scope="module")
def published() -> list[PeerPrediction]:
    return read_peers(FACTS / "peer_predictions.csv")


@pytest.fixture(scope="module")
def beside_measurements(published: list[PeerPrediction]) -> list[Comparison]:
    cases = [case.operation for case in published]
    return compare(published, read_measurements(FACTS / "measured_e2e_dev.csv", cases))


@needs_facts
def test_most_cases_of_the_peers_are_predicted_and_some_are_measured(
    published: list[PeerPrediction], beside_measurements: list[Comparison]
) -> None:
    assert len(published) > 5000 and all(case.operation.ms > 0 for case in published[::50])
    assert len({pair.peer.tool for pair in beside_measurements}) >= 9
    assert len({pair.measurement.row.line for pair in beside_measurements}) >= 30


@needs_facts
def test_membound_agrees_with_peers_that_agree_with_the_measurement(beside_measurements: list[Comparison]) -> None:
    right = [pair for pair in beside_measurements if abs(pair.peer_error) < 0.10]
    off = [abs(pair.peer.ms / pair.peer.operation.ms - 1.0) for pair in right]
    assert len(right) >= 20 and np.median(off) < 0.10


NEARER_THAN_MEMBOUND = pytest.mark.xfail(
    strict=False, reason="aiconfigurator's TensorRT-LLM tables: measured 8.6 % against membound's 9.5 % in decode"
)
TOOLS = {
    "GenZ-pypi": None,
    "GenZ-repo": None,
    "LLM-Viewer@472f71f/flash": None,
    "LLM-Viewer@472f71f/noflash": None,
    "llm-analysis-d841e40": None,
    "reference-roofline/SOL": None,
    "reference-roofline/calibrated": None,
    "aiconfigurator-0.12.0/vllm/SOL": None,
    "aiconfigurator-0.12.0/vllm/SILICON": None,
    "aiconfigurator-0.12.0/vllm/HYBRID": None,
    "aiconfigurator-0.12.0/trtllm/SILICON": NEARER_THAN_MEMBOUND,
}


@needs_facts
@pytest.mark.parametrize("tool", [pytest.param(tool, marks=marks) if marks else tool for tool, marks in TOOLS.items()])
def test_membound_is_nearer_than_the_peer_on_its_cases(beside_measurements: list[Comparison], tool: str) -> None:
    found = [group for group in nearness(beside_measurements) if group.tool == tool and group.kind != FROM_THE_HOST]
    assert found and all(group.median <= group.peer_median for group in found)


FROM_THE_HOST = "decode, launched from the host"
LAUNCHED = [tool for tool in TOOLS if not tool.startswith("LLM-Viewer") and "HYBRID" not in tool]


@needs_facts
@pytest.mark.parametrize("tool", LAUNCHED)
def test_membound_is_no_further_off_where_the_host_launches_and_nobody_is_told(
    beside_measurements: list[Comparison], tool: str
) -> None:
    (found,) = [group for group in nearness(beside_measurements) if (group.tool, group.kind) == (tool, FROM_THE_HOST)]
    assert found.median <= found.peer_median


@needs_facts
@pytest.mark.xfail(strict=False, reason="measured: nearer in 363 of 401 comparisons")
def test_membound_is_nearer_wherever_there_is_a_measurement(beside_measurements: list[Comparison]) -> None:
    assert all(pair.membound_is_nearer for pair in beside_measurements)


@needs_facts
def test_membound_is_nearer_nearly_everywhere(beside_measurements: list[Comparison]) -> None:
    assert np.mean([pair.membound_is_nearer for pair in beside_measurements]) > 0.85
