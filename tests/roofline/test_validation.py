"""Are tables read as they are written, are rows predicted blindly, and are the stated errors met?

The second half reads the published measurements beside the repository and holds membound to the numbers that it is
meant to reach. Where it does not reach one, the test says by how much and is expected to fail.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from membound.roofline.errors import MemboundError
from membound.roofline.validation.generalisation import leave_out, parts_of
from membound.roofline.validation.kernel_batches import KernelBatch
from membound.roofline.validation.profiles import UNKNOWN_ENGINE, leave_engines_out, leave_models_out
from membound.roofline.validation.ratios import RatioGroup, groups, ratios
from membound.roofline.validation.report import Group, RowResult, ValidationReport, validate_table
from membound.roofline.validation.tables import END_TO_END_COLUMNS, OPERATOR_COLUMNS, read_table

FACTS = Path(__file__).parents[3] / "shared" / "facts"
OPERATORS, END_TO_END = FACTS / "measured_ops_dev.csv", FACTS / "measured_e2e_dev.csv"
needs_facts = pytest.mark.skipif(not FACTS.is_dir(), reason="../shared/facts, the published measurements, is not here")

GEMM = {"source": "lab", "gpu": "H100-SXM5", "op": "gemm", "m": 8, "n": 8192, "k": 8192, "dtype": "bf16"}
RUN = {
    "source": "lab",
    "engine": "vllm",
    "engine_version": "0.16",
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
    "input_len": 512,
    "output_len": 128,
    "metric": "tpot_ms",
    "value": 8.0,
}


def table(path: Path, rows: Sequence[Mapping[str, object]], columns: Sequence[str] = OPERATOR_COLUMNS) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def gemms(path: Path, *rows: Mapping[str, object]) -> ValidationReport:
    return validate_table(table(path, [{**GEMM, "latency_us": 80.0, **row} for row in rows]))


def runs(path: Path, *rows: Mapping[str, object]) -> ValidationReport:
    return validate_table(table(path, [{**RUN, **row} for row in rows], END_TO_END_COLUMNS))


def predictions(report: ValidationReport) -> list[float | None]:
    return [result.predicted for result in report.results]


# --- what a table is ---


def test_a_table_is_told_apart_by_its_columns(tmp_path: Path) -> None:
    assert gemms(tmp_path / "ops.csv", {}).schema == "operators"
    assert runs(tmp_path / "runs.csv", {}).schema == "end_to_end"


def test_columns_of_runs_of_which_nothing_is_known_may_be_left_out(tmp_path: Path) -> None:
    known = {name: value for name, value in RUN.items() if value}
    whole = validate_table(table(tmp_path / "whole.csv", [RUN], END_TO_END_COLUMNS))
    short = validate_table(table(tmp_path / "short.csv", [known], tuple(known)))
    assert len(known) < len(END_TO_END_COLUMNS) and [one.predicted for one in short.results] == [
        one.predicted for one in whole.results
    ]


def test_columns_may_be_in_any_order_and_more_than_needed(tmp_path: Path) -> None:
    columns = ("mine", *reversed(OPERATOR_COLUMNS))
    read = read_table(table(tmp_path / "ops.csv", [GEMM | {"latency_us": 80.0, "mine": "x"}], columns))
    assert read.header == columns and read.rows[0].text("mine") == "x" and read.rows[0].measured == 80.0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "lacks the columns source"),
        (b"a,b\n1,2\n", f"lacks the columns {', '.join(OPERATOR_COLUMNS)} of the operators schema"),
        (",".join(c for c in OPERATOR_COLUMNS if c != "kv_len").encode(), "lacks the columns kv_len of the operators"),
        (",".join(c for c in END_TO_END_COLUMNS if c != "value").encode(), "lacks the columns value of the end-to-end"),
        (b"model,engine,value\nx,vllm,1\n", "lacks the columns gpu, metric of the end-to-end schema"),
        (",".join(OPERATOR_COLUMNS).encode(), "has a header and no rows"),
        (b"source,\xff\xfe\n", "is not CSV in UTF-8"),
    ],
)
def test_a_file_that_is_no_table_is_one_sentence(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(MemboundError, match=says) as caught:
        read_table(path)
    assert "t.csv" in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_is_a_folder_is_one_sentence(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(MemboundError, match="cannot be read"):
            read_table(path)


@pytest.mark.parametrize("value", ["nan", "inf", "-3", "0", "", "fast"])
def test_a_measured_value_that_is_no_number_above_0_names_line_and_value(tmp_path: Path, value: str) -> None:
    rows = [{**GEMM, "latency_us": 80.0}, {**GEMM, "latency_us": value}]
    with pytest.raises(MemboundError, match=f"line 3: latency_us is '{value}'; it must be a number above 0"):
        read_table(table(tmp_path / "ops.csv", rows))


# --- what a row that cannot be predicted says ---


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "fp7"}, "dtype 'fp7' is unknown"),
        ({"gpu": "H9000"}, "'H9000' is unknown"),
        ({"op": "dance"}, "op 'dance' is unknown"),
        ({"m": "nan"}, "m is 'nan'; it must be a whole number of 1 or more"),
        ({"m": -8}, "m is '-8'; it must be a whole number of 1 or more"),
        ({"n": ""}, "n is ''; it must be a whole number of 1 or more"),
        ({"op": "moe_ffn"}, "notes lack E=..., the experts"),
    ],
)
def test_an_operator_that_cannot_be_predicted_has_a_reason(
    tmp_path: Path, change: Mapping[str, object], says: str
) -> None:
    report = gemms(tmp_path / "ops.csv", {}, change)
    good, bad = report.results
    assert good.predicted is not None and not good.reason
    assert bad.predicted is None and says in bad.reason and not bad.judged
    assert (report.rows, report.predicted, report.refused) == (2, 1, 1)
    assert report.refusals == {bad.reason: 1}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "no such model"}, "no such model"),
        ({"gpu": "H9000"}, "'H9000' is unknown"),
        ({"weight_dtype": "int99"}, "int99"),
        ({"metric": "happiness"}, "metric 'happiness' is unknown"),
        ({"technique": "CPU offload"}, "offloaded"),
        ({"technique": "speculative decoding", "metric": "decode_tok_s_per_user"}, "acceptance length"),
    ],
)
def test_a_run_that_cannot_be_predicted_has_a_reason(tmp_path: Path, change: Mapping[str, object], says: str) -> None:
    report = runs(tmp_path / "runs.csv", {}, change)
    assert report.refused == 1 and says in report.results[1].reason


# --- a text is read whole or its row is refused ---


@pytest.mark.parametrize("column", ["input_len", "output_len", "batch_or_concurrency"])
@pytest.mark.parametrize("text", ["1,024", "4k", "-1000", "x", "~8 or so", "1.2.3", "1_000", "1e9", "nan"])
def test_an_amount_that_is_not_a_plain_number_refuses_its_row_alone(tmp_path: Path, column: str, text: str) -> None:
    good, bad = runs(tmp_path / "runs.csv", {}, {column: text}).results
    assert good.predicted is not None and bad.predicted is None
    assert bad.reason.startswith(f"line 3: {column} is '{text}'; it must be") and "\n" not in bad.reason


@pytest.mark.parametrize("column", ["input_len", "output_len", "batch_or_concurrency"])
def test_a_number_is_the_same_in_every_notation(tmp_path: Path, column: str) -> None:
    plain, *others = predictions(runs(tmp_path / "runs.csv", *({column: text} for text in ("1000", "1e3", "1000.0"))))
    assert plain is not None and others == [plain, plain]


def test_approximate_lengths_and_names_of_data_sets_are_lengths(tmp_path: Path) -> None:
    texts = ("~294 (OpenOrca mean)", "dataset", "294", "MT-bench", "200")
    about, named, exact, bench, two_hundred = predictions(
        runs(tmp_path / "runs.csv", *({"input_len": t} for t in texts))
    )
    assert about == named == exact != bench == two_hundred


MOE = {"op": "moe_ffn", "m": 64, "n": 14336, "k": 4096}
ATTENTION = {"op": "prefill_attention", "batch": 1, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"op": "allreduce", "tp": 0.5, "m": 1024}, "tp is '0.5'; it must be a whole number from 1 to 4096"),
        (MOE | {"notes": "E=8;topk=2;moe_tp=0"}, "'moe_tp=' in notes is '0'"),
        (MOE | {"notes": "E=8;topk=2;ep=0"}, "'ep=' in notes is '0'"),
        (MOE | {"notes": "E=0;topk=2"}, "'E=' in notes is '0'"),
        (MOE | {"notes": "E=8;topk=9"}, "'topk=' in notes is '9'; it must be a whole number from 1 to 8"),
        (MOE | {"notes": f"E={'9' * 20};topk=2;dist=power_law_1.2"}, "from 1 to 65536"),
        (MOE | {"notes": "E=8;topk=2;dist=power_law_1.2.3"}, "power_law_ in notes is '1.2.3'"),
        (MOE | {"notes": "E=8;topk=2;dist=power_law_900"}, "power_law_ in notes is '900'"),
        (ATTENTION | {"q_len": 1_000_000, "kv_len": 10}, "q_len is 1000000; kv_len, 10"),
        (ATTENTION | {"q_len": "", "kv_len": 10}, "q_len is ''"),
    ],
)
def test_impossible_amounts_of_an_operator_refuse_its_row(
    tmp_path: Path, change: Mapping[str, object], says: str
) -> None:
    good, bad = gemms(tmp_path / "ops.csv", {}, change).results
    assert good.predicted is not None and bad.predicted is None and says in bad.reason


SPECULATION = {"technique": "speculative", "metric": "decode_tok_s_per_user"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (SPECULATION | {"notes": "accepted tokens 3.5.6"}, "'accepted tokens' in notes is '3.5.6'"),
        (SPECULATION | {"notes": "acceptance length 0"}, "'acceptance length' in notes is '0'"),
        ({"notes": "measured average batch ."}, "lack the number behind 'measured average batch'"),
        ({"notes": "attn DP 1.2.3"}, "'attn DP' in notes is '1.2.3'"),
        ({"notes": "0 decode ranks"}, "'decode ranks' in notes is '0'"),
        ({"notes": "foo_tp0_ep0_1;"}, "'tp' in notes is '0'"),
        ({"tp": 5000}, "tp is '5000'; it must be a whole number from 1 to 4096"),
        ({"pp": 5000}, "pp is '5000'; it must be a whole number from 1 to 4096"),
        ({"notes": "attn DP 5000"}, "'attn DP' in notes is '5000'; it must be a whole number from 1 to 4096"),
        ({"technique": "2:4 sparsity", "metric": "speedup_x", "weight_dtype": ""}, "weight_dtype is ''"),
        ({"input_len": 512_000_000, "metric": "e2e_latency_ms"}, "input_len is '512000000'; it must be a number from"),
        ({"input_len": "1e9", "flags": "online"}, "input_len is '1e9'; it must be a number from 0 to"),
    ],
)
def test_impossible_statements_of_a_run_refuse_its_row(tmp_path: Path, change: Mapping[str, object], says: str) -> None:
    good, bad = runs(tmp_path / "runs.csv", {}, change).results
    assert good.predicted is not None and bad.predicted is None and says in bad.reason


def test_the_full_stop_of_a_sentence_and_prose_are_no_part_of_a_number(tmp_path: Path) -> None:
    notes = ("mean acceptance length 3.5", "Mean acceptance length 3.5.", "no EP . acceptance length 3.5, at batch 1")
    plain, *others = predictions(runs(tmp_path / "runs.csv", *(SPECULATION | {"notes": text} for text in notes)))
    assert plain is not None and others == [plain, plain]


def test_a_prediction_that_is_no_number_above_0_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelBatch, "predict", lambda self, p: np.array([-10.5, np.nan, np.inf, 1e-5]))
    found = gemms(tmp_path / "ops.csv", *({"latency_us": 1e4} for _ in range(4))).results
    assert [result.judged for result in found] == [False, False, False, True]
    assert "the prediction is -1.05e+07; not above 0" in found[0].reason


def test_a_busier_device_draws_more_and_never_more_than_its_board_may(tmp_path: Path) -> None:
    """Joules a token times tokens a second are the watts of the one device, an H100 of 700 W."""
    drawn = []
    for batch in (1, 16, 256, 4096):
        rows = ({"metric": m, "batch_or_concurrency": batch} for m in ("joules_per_token", "throughput_tok_s_total"))
        joules, rate = predictions(runs(tmp_path / "runs.csv", *rows))
        assert joules is not None and rate is not None
        drawn.append(joules * rate)
    assert drawn == sorted(drawn) and 0.3 * 700 < drawn[0] < drawn[-1] <= 700


def test_an_engine_is_left_out_by_forgetting_its_profile(tmp_path: Path) -> None:
    rows = [RUN | {"engine": engine, "batch_or_concurrency": batch} for engine in ("vllm", "mine") for batch in (1, 64)]
    path = table(tmp_path / "runs.csv", rows, END_TO_END_COLUMNS)
    known, general = sorted(leave_engines_out(path), key=lambda left: left.profile == UNKNOWN_ENGINE)
    assert (known.profile, known.rows, general.profile, general.rows) == ("vllm", 2, UNKNOWN_ENGINE, 2)
    assert general.own == general.unknown == known.unknown != known.own


def test_a_model_that_was_left_out_is_predicted_by_the_others_of_its_engine(tmp_path: Path) -> None:
    """Rows that one profile makes: what two models show of it holds for the third."""
    models, batches = ("Llama-2-7B", "Llama-2-13B", "Llama-3.1-8B"), (1, 2, 4, 8, 16, 32, 64)
    rows = [
        {"engine": "turbomind", "model": model, "batch_or_concurrency": batch} for model in models for batch in batches
    ]
    made = predictions(runs(tmp_path / "blind.csv", *rows))
    path = table(
        tmp_path / "made.csv",
        [{**RUN, **row, "value": value} for row, value in zip(rows, made, strict=True)],
        END_TO_END_COLUMNS,
    )
    (left,) = leave_models_out(path)
    assert left.profile == "turbomind" and left.rows == len(rows)
    assert left.own < 1e-6 and left.unknown < 0.03


def test_what_cannot_be_left_out_is_refused(tmp_path: Path) -> None:
    of_runs = table(tmp_path / "runs.csv", [RUN], END_TO_END_COLUMNS)
    with pytest.raises(MemboundError, match="end-to-end runs; leaving out needs a table of operators"):
        parts_of(of_runs, "device")
    with pytest.raises(MemboundError, match="has one source at most"):
        parts_of(table(tmp_path / "ops.csv", [GEMM | {"latency_us": 80.0}]), "source")


def test_latents_that_are_keys_and_values_at_once_are_read_once(tmp_path: Path) -> None:
    """One head of 576 numbers is MLA's: for the memory it is what keys and values of 288 each are."""
    long = {"op": "decode_attention", "batch": 64, "q_len": 1, "kv_len": 32768, "n_heads": 8, "n_kv_heads": 1}
    latents, plain = predictions(gemms(tmp_path / "a.csv", {**long, "head_dim": 576}, {**long, "head_dim": 288}))
    assert latents == pytest.approx(plain, rel=0.15)


# --- predictions are blind ---


def test_an_operators_prediction_does_not_look_at_the_measured_time(tmp_path: Path) -> None:
    attention = {"op": "decode_attention", "batch": 32, "q_len": 1, "kv_len": 4096}
    attention |= {"n_heads": 32, "n_kv_heads": 8, "head_dim": 128}
    rows: list[dict[str, object]] = [{}, {"m": 4096}, {"op": "allreduce", "tp": 8, "m": 2**24}, attention]
    first = gemms(tmp_path / "a.csv", *rows)
    second = gemms(tmp_path / "b.csv", *({**row, "latency_us": 1e4} for row in rows))
    assert None not in predictions(first) and predictions(first) == predictions(second)


def test_a_runs_prediction_does_not_look_at_the_measured_value(tmp_path: Path) -> None:
    metrics = ("tpot_ms", "prefill_ms", "throughput_tok_s_total", "e2e_latency_ms", "joules_per_token")
    first = runs(tmp_path / "a.csv", *({"metric": metric} for metric in metrics))
    second = runs(tmp_path / "b.csv", *({"metric": metric, "value": 1e3} for metric in metrics))
    assert None not in predictions(first) and predictions(first) == predictions(second)


def test_a_row_is_predicted_the_same_alone_and_among_others(tmp_path: Path) -> None:
    rows = [{"m": m} for m in (1, 8, 512, 4096)]
    together = predictions(gemms(tmp_path / "all.csv", *rows))
    alone = [predictions(gemms(tmp_path / "one.csv", row))[0] for row in rows]
    assert together == pytest.approx(alone, rel=1e-12)


# --- what the report says ---


def test_errors_are_those_of_the_rows(tmp_path: Path) -> None:
    """Measured times that are known multiples of the predictions give back these multiples."""
    sizes = [4096, 6144, 8192, 10240, 12288]
    plain = predictions(gemms(tmp_path / "a.csv", *({"n": n} for n in sizes)))
    off = [0.9, 1.0, 1.1, 1.2, 2.0]
    rows = [{"n": n, "latency_us": us * by} for n, us, by in zip(sizes, plain, off, strict=True) if us]
    report = gemms(tmp_path / "b.csv", *rows)
    errors = [1.0 / by - 1.0 for by in off]
    overall = report.groups[0]
    assert [result.error for result in report.results] == pytest.approx(errors)
    assert overall.n == 5 and overall.median_ape == pytest.approx(np.median(np.abs(errors)))
    assert overall.bias == pytest.approx(np.median(errors)) and overall.mean_ape == pytest.approx(
        np.mean(np.abs(errors))
    )
    assert report.worst[0].row.text("n") == "12288"
    assert overall.within_interval < 1.0


def test_every_grouping_holds_every_judged_row_once(tmp_path: Path) -> None:
    rows = [{"m": m, "gpu": gpu, "source": gpu} for m in (1, 64, 4096) for gpu in ("H100-SXM5", "L40S")]
    report = gemms(tmp_path / "ops.csv", *({**row, "latency_us": 1e4} for row in rows))
    totals: dict[tuple[str, ...], int] = {}
    for group in report.groups:
        totals[tuple(group.by)] = totals.get(tuple(group.by), 0) + group.n
    assert {names: n for names, n in totals.items() if names != ("model",)} == dict.fromkeys(
        [(), ("phase",), ("source",), ("device",), ("batch",), ("device", "phase")], 6
    )
    assert [group.by["batch"] for group in report.groups if tuple(group.by) == ("batch",)] == [
        "1",
        "17 to 64",
        "above 256",
    ]


def test_flagged_rows_are_predicted_and_not_judged(tmp_path: Path) -> None:
    asides = [{"flags": "suspect"}, {"flags": "kv_assumed;host_bound"}, {"trust": "C"}, {"value": 0.5}]
    report = runs(tmp_path / "runs.csv", {}, {"flags": "kv_assumed"}, *asides)
    assert [result.judged for result in report.results] == [True, True, False, False, False, False]
    assert report.refused == 0 and sum(report.set_aside.values()) == 4
    assert "measured faster than the device's roofs allow for the stated load" in report.set_aside


def test_an_operator_beyond_the_roofs_is_set_aside_and_one_at_them_is_not(tmp_path: Path) -> None:
    """8192 x 8192 in bf16 are 134 MB, for which 3.35 TB/s take 40 microseconds."""
    report = gemms(tmp_path / "ops.csv", {"latency_us": 1.0}, {"latency_us": 8192 * 8192 * 2 / 3.3e6})
    assert [result.judged for result in report.results] == [False, True]


def test_rows_that_are_written_hold_the_table_and_read_back(tmp_path: Path) -> None:
    report = gemms(tmp_path / "ops.csv", {"notes": 'a, "b"\nc'}, {"dtype": "fp7"}, {"m": 4096})
    report.write_rows(tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert list(written[0]) == [*OPERATOR_COLUMNS, "predicted", "low", "high", "reason"]
    assert [{name: row[name] for name in OPERATOR_COLUMNS} for row in written] == [
        r.row.columns for r in report.results
    ]
    assert written[1]["predicted"] == "" and "fp7" in written[1]["reason"]
    for row, result in zip(written, report.results, strict=True):
        if result.predicted is not None:
            assert float(row["predicted"]) == pytest.approx(result.predicted, rel=1e-5)
            assert float(row["low"]) < float(row["predicted"]) < float(row["high"])
    assert predictions(validate_table(tmp_path / "rows.csv")) == predictions(report)


def test_rows_are_never_written_over_the_table_nor_into_nowhere(tmp_path: Path) -> None:
    report = gemms(tmp_path / "ops.csv", {})
    before = report.path.read_bytes()
    with pytest.raises(MemboundError, match="is the table itself"):
        report.write_rows(report.path)
    (tmp_path / "link.csv").hardlink_to(report.path)
    with pytest.raises(MemboundError, match="is the table itself"):
        report.write_rows(tmp_path / "link.csv")
    assert report.path.read_bytes() == before
    with pytest.raises(MemboundError, match="cannot be written"):
        report.write_rows(tmp_path / "no" / "such" / "folder.csv")


# --- the errors that are promised, on published measurements ---


@pytest.fixture(scope="module")
def operators() -> ValidationReport:
    return validate_table(OPERATORS)


@pytest.fixture(scope="module")
def end_to_end() -> ValidationReport:
    return validate_table(END_TO_END)


def group(results: Sequence[RowResult], chosen: Callable[[RowResult], object]) -> Group:
    members = [result for result in results if chosen(result)]
    assert len(members) >= 20, "too few rows to say anything"
    return Group.of({}, members)


def column(result: RowResult, name: str) -> float:
    """A column as a number, 0 where it is none."""
    text = result.row.text(name)
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


OPERATOR_CRITERIA: dict[str, tuple[float, Callable[[RowResult], object]]] = {
    "decode attention": (0.10, lambda r: r.phase == "decode_attention"),
    "gemm m <= 16": (0.10, lambda r: r.phase == "gemm m <= 16"),
    "gemm m >= 1024": (0.14, lambda r: r.phase == "gemm m >= 1024"),
    "prefill attention": (0.14, lambda r: r.phase == "prefill_attention" and column(r, "q_len") >= 1024),
}


@needs_facts
@pytest.mark.parametrize("name", OPERATOR_CRITERIA)
def test_the_median_error_and_the_bias_of_operators(operators: ValidationReport, name: str) -> None:
    limit, chosen = OPERATOR_CRITERIA[name]
    found = group(operators.judged, chosen)
    assert found.median_ape <= limit
    assert abs(found.bias) < 0.05


@needs_facts
def test_all_reduce_from_4_mb(operators: ValidationReport) -> None:
    found = group(operators.judged, lambda r: r.model == "allreduce" and column(r, "m") >= 4e6)
    assert found.median_ape <= 0.20


@needs_facts
def test_at_most_one_row_in_twenty_is_refused(operators: ValidationReport, end_to_end: ValidationReport) -> None:
    for report in (operators, end_to_end):
        assert report.refused <= 0.05 * report.rows


@needs_facts
def test_decode_on_one_gpu(end_to_end: ValidationReport) -> None:
    found = group(end_to_end.judged, lambda r: r.phase == "decode" and column(r, "n_gpu") == 1)
    assert found.median_ape <= 0.10
    assert found.p90_ape <= 0.25


@needs_facts
def test_prefill_of_prompts_from_1k_tokens(end_to_end: ValidationReport) -> None:
    found = group(end_to_end.judged, lambda r: r.phase == "prefill" and column(r, "input_len") >= 1000)
    assert found.median_ape <= 0.15


@needs_facts
def test_prefill_of_batches_from_1k_tokens(end_to_end: ValidationReport) -> None:
    found = group(end_to_end.judged, lambda r: r.phase == "prefill" and (r.batch or 1) * column(r, "input_len") >= 1000)
    assert found.median_ape <= 0.15


@needs_facts
@pytest.mark.parametrize("metric", ["tpot_ms", "throughput"])
def test_the_median_error_of_serving(end_to_end: ValidationReport, metric: str) -> None:
    found = group(end_to_end.judged, lambda r: r.phase == "serving" and r.row.text("metric").startswith(metric))
    assert found.median_ape <= 0.20


@needs_facts
@pytest.mark.parametrize("metric", ["tpot_ms", "throughput"])
def test_serving_is_ranked_as_it_was_measured(end_to_end: ValidationReport, metric: str) -> None:
    from scipy.stats import spearmanr

    rows = [r for r in end_to_end.judged if r.phase == "serving" and r.row.text("metric").startswith(metric)]
    assert spearmanr([r.predicted for r in rows], [r.row.measured for r in rows]).statistic >= 0.95


@pytest.fixture(scope="module")
def changes(end_to_end: ValidationReport) -> dict[str, RatioGroup]:
    return {found.kind: found for found in reversed(groups(ratios(end_to_end))) if not found.phase}


WRONG_SIGNS = pytest.mark.xfail(
    strict=False,
    reason="measured: right in 171 of 175; of the others 3 are behind 129,024 tokens in vLLM 0.6",
)
KINDS = ("all", "weights", "kv cache", "tensor parallelism", "stated speed-ups of formats", "speculation")


@needs_facts
@pytest.mark.parametrize("kind", KINDS)
def test_the_median_error_of_ratios(changes: dict[str, RatioGroup], kind: str) -> None:
    assert changes[kind].median_ape <= 0.15


@needs_facts
@pytest.mark.parametrize("kind", ["all", "weights", "tensor parallelism"])  # of KV caches there are seven
def test_intervals_of_ratios_hold_what_they_are_meant_to(changes: dict[str, RatioGroup], kind: str) -> None:
    within = changes[kind].within
    assert within is not None and within >= 0.8


@needs_facts
@pytest.mark.parametrize("kind", [k if k != "weights" else pytest.param(k, marks=WRONG_SIGNS) for k in KINDS[1:]])
def test_ratios_have_the_right_sign(changes: dict[str, RatioGroup], kind: str) -> None:
    assert changes[kind].right_sign == 1.0


@needs_facts
@pytest.mark.xfail(
    strict=False,
    reason="measured 13 of 5,993 operators (decode attention of TensorRT-LLM on A100, which read half of what the rows "
    "say) and 4 of 2,908 runs (3 are gpt-oss on H100: mean TPOT "
    "below 6 ms with 512 clients)",
)
@pytest.mark.parametrize("level", ["operators", "end_to_end"])
def test_no_row_that_its_table_does_not_flag_is_beyond_the_roofs(level: str, request: pytest.FixtureRequest) -> None:
    report: ValidationReport = request.getfixturevalue(level)
    beyond = [result.row for result in report.results if "faster than the device's roofs" in result.reason]
    assert [row.line for row in beyond if "<L2" not in row.text("notes")] == []


@needs_facts
def test_few_rows_are_set_aside_as_beyond_the_roofs(operators: ValidationReport, end_to_end: ValidationReport) -> None:
    """So that the roofs do not hide errors of the model."""
    for report, most in ((operators, 0.02), (end_to_end, 0.005)):
        assert sum("faster than the device's roofs" in r.reason for r in report.results) <= most * report.rows


@needs_facts
def test_published_rows_are_predicted_blindly(tmp_path: Path) -> None:
    for path, value in ((OPERATORS, "latency_us"), (END_TO_END, "value")):
        read = read_table(path)
        rows = [row.columns for row in read.rows[::60]]
        plain = validate_table(table(tmp_path / "a.csv", rows, read.header))
        changed = [{**row, value: str(3.0 * float(row[value]))} for row in rows]
        assert predictions(validate_table(table(tmp_path / "b.csv", changed, read.header))) == predictions(plain)


# Fitting everything again for each part takes minutes, so that every tenth row stands for all here; the errors of the
# whole table are in roofline/VALIDATION.md.
THINNED, FEWEST = 10, 10
GENERAL = ("gemm", "decode_attention", "prefill_attention", "allreduce")
LEFT_OUT = {
    "decode_attention": 1.5 * 0.10,
    "gemm m <= 16": 1.5 * 0.10,
    "gemm m >= 1024": 1.5 * 0.14,
    "prefill_attention": 1.5 * 0.14,
    "collective": 1.5 * 0.20,
}


NOT_GENERAL = {
    ("device", "decode_attention"): "every tenth row: median error measured above 15 %, of the whole table 14.6 %",
}


def phases(part: str) -> list[object]:
    """The phases of `LEFT_OUT`, those marked that miss their limit."""
    marked = {phase: reason for (of, phase), reason in NOT_GENERAL.items() if of == part}
    missing = {phase: pytest.mark.xfail(strict=False, reason=reason) for phase, reason in marked.items()}
    return [pytest.param(phase, marks=missing.get(phase, ())) for phase in LEFT_OUT]


@pytest.fixture(scope="module")
def thinned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of the devices and sources that have some, prefill and all-reduce where they are promised."""
    read = read_table(OPERATORS)
    rows = [row.columns for row in read.rows if row.text("op") in GENERAL and _is_general(row.columns)][::THINNED]
    for part in ("gpu", "source"):
        counts = Counter(row[part] for row in rows)
        rows = [row for row in rows if counts[row[part]] >= FEWEST]
    return table(tmp_path_factory.mktemp("thinned") / "ops.csv", rows, read.header)


def _is_general(row: Mapping[str, str]) -> bool:
    if row["op"] == "prefill_attention":
        return float(row["q_len"] or 0) >= 1024
    return row["op"] != "allreduce" or float(row["m"]) >= 4e6


@pytest.fixture(scope="module")
def by_device(thinned: Path) -> dict[str, Group]:
    return _overall(leave_out(parts_of(thinned, "device"), "device"))


@pytest.fixture(scope="module")
def by_source(thinned: Path) -> dict[str, Group]:
    return _overall(leave_out(parts_of(thinned, "source"), "source"))


def _overall(found: Sequence[Group]) -> dict[str, Group]:
    return {g.by.get("phase", "all"): g for g in found if g.by["left out"].startswith("each ")}


@needs_facts
@pytest.mark.slow
@pytest.mark.parametrize("phase", phases("device"))
def test_a_device_that_was_not_fitted(by_device: dict[str, Group], phase: str) -> None:
    assert by_device[phase].median_ape <= LEFT_OUT[phase]


@needs_facts
@pytest.mark.slow
@pytest.mark.parametrize("phase", phases("source"))
def test_a_source_that_was_not_fitted(by_source: dict[str, Group], phase: str) -> None:
    assert by_source[phase].median_ape <= LEFT_OUT[phase]


@needs_facts
@pytest.mark.slow
def test_a_device_known_from_its_data_sheet(by_device: dict[str, Group]) -> None:
    assert by_device["all"].median_ape <= 0.20
