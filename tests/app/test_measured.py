"""Does a measurement stand beside the prediction of the same technique in the same format, and of this machine only?"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from membound.app import judged
from membound.app.compare import ComparisonResult, predict_rows
from membound.app.engine_choice import EngineChoice
from membound.app.i18n import Translate
from membound.app.keeping import keep_comparison, keep_run
from membound.app.records import Run
from membound.app.store import Store
from membound.app.views.measured import measured_gains, measured_together, nearest
from membound.roofline.hardware import HardwareSpec, get_hardware
from membound.roofline.results.comparison import Comparison
from membound.roofline.results.result import RunResult
from membound.roofline.scenario import Scenario, load_scenario
from membound.roofline.techniques import (
    W8A8,
    ContinuousBatching,
    Int8Weights,
    KvQuantization,
    Mtp,
    NgramSpeculation,
    Sparsity24,
    Technique,
    WeightQuantization,
)
from membound.simulator.run import run as simulate

T = Translate("en")
ALL = load_scenario("all-techniques-cpu")
INT4 = WeightQuantization(format="int4")
CHOICE = EngineChoice(ALL.model, "local", 1, "graphs", 4, 512, "tpot_s")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store on a calibrated machine."""
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path))
    (tmp_path / "calibration").mkdir()
    shutil.copy(Path(__file__).with_name("calibration.json"), tmp_path / "calibration" / "local.json")
    return Store(tmp_path)


def _row(name: str, users: int, measured: float) -> dict[str, Any]:
    row = Comparison(
        technique=name, baseline="bf16 weights", metric="tpot_s", unit="ratio",
        point={"workload.arrivals.concurrency": users, "workload.requests": 4 * users},
        predicted=measured, low=measured, high=measured, measured=measured, spread=0.01, error=0.0, verdict="gain",
        lossless=False, quality=None, bottleneck_before="memory_weights", bottleneck_after="overhead", samples=[],
        conditions="here",
    )  # fmt: skip
    return row.model_dump(mode="json")


def _compared(store: Store, scenario: Scenario = ALL, users: int = 8) -> list[str]:
    """A comparison that gained 1.01 with the first of the scenario's engines, 1.02 with the second, and so on."""
    names = [variant.name for variant in scenario.compared()]
    rows = [_row(name, users, 1 + at / 100) for at, name in enumerate(names, start=1)]
    store.save_run(
        kind="compare", label=scenario.name, digest="d", scenario_yaml=scenario.to_yaml(), summary={"rows": len(rows)},
        comparison={"comparisons": rows},
    )  # fmt: skip
    return names


def _gain(technique: Technique) -> float | None:
    found = nearest(measured_gains(ALL.model, "local"), technique, 8)
    return None if found is None else found.row.measured


# --- of the same technique ---


def test_every_technique_that_was_measured_alone_is_found_in_its_format(store: Store) -> None:
    names = _compared(store)
    for at, variant in enumerate(ALL.compared(), start=1):
        if len(variant.techniques) == 1 and not variant.set:
            assert _gain(variant.techniques[0]) == 1 + at / 100, names[at - 1]


@pytest.mark.parametrize(
    ("technique", "name"),
    [
        (INT4, "weight_quantization int4"),
        (WeightQuantization(format="int4", method="gptq"), "weight_quantization int4 gptq"),
        (KvQuantization(format="int8"), "kv_quantization int8"),
        (KvQuantization(format="fp8"), "kv_quantization fp8"),
        (W8A8(format="int8"), "w8a8 int8"),
        (Sparsity24(), "sparsity_2_4 wanda"),  # as fast, whichever weights are zero
        (NgramSpeculation(), "ngram_speculation gamma 4"),  # the best length is found at each point
    ],
)
def test_a_prediction_has_the_measurement_of_its_own_format(store: Store, technique: Technique, name: str) -> None:
    names = _compared(store)
    assert _gain(technique) == 1 + (names.index(name) + 1) / 100


@pytest.mark.parametrize(
    "technique", [KvQuantization(format="kivi2"), WeightQuantization(format="nvfp4"), W8A8(format="fp8"), Mtp()]
)
def test_a_prediction_has_no_measurement_of_another_format(store: Store, technique: Technique) -> None:
    _compared(store)
    assert _gain(technique) is None


def test_the_words_say_format_method_and_baseline(store: Store) -> None:
    _compared(store)
    known = measured_gains(ALL.model, "local")
    said = [nearest(known, technique, 8) for technique in (INT4, WeightQuantization(format="int4", method="gptq"))]
    plain, chosen = (one.shown(T) for one in said if one is not None)
    assert "int4, rtn, against bf16 weights)" in plain and "int4, gptq, against bf16 weights)" in chosen


def test_engines_with_other_settings_and_stacks_are_no_gain_of_a_technique(store: Store) -> None:
    _compared(store)
    alone = [one for one in ALL.compared() if len(one.techniques) == 1 and not one.set]
    assert len(measured_gains(ALL.model, "local")) == len(alone) < len(ALL.compared())


def test_a_point_of_the_sweep_says_which_model_was_measured(store: Store) -> None:
    scenario = ALL.model_copy(update={"sweep": ()})
    row = _row("int8_weights", 2, 1.5) | {"point": {"model": "SmolLM2-360M", "workload.arrivals.concurrency": 2}}
    store.save_run(
        kind="compare", label="two models", digest="d", scenario_yaml=scenario.to_yaml(), summary={},
        comparison={"comparisons": [row]},
    )  # fmt: skip
    assert measured_gains(ALL.model, "local") == []
    assert [one.users for one in measured_gains("SmolLM2-360M", "local")] == [2]


# --- of this machine ---


def _by(run: RunResult, **provenance: Any) -> RunResult:
    made = run.provenance.model_dump() | provenance
    return replace(run, provenance=type(run.provenance).model_validate(made))


@pytest.fixture(scope="module")
def h100() -> tuple[Scenario, HardwareSpec]:
    scenario = load_scenario("live-cpu").with_value("hardware", "H100-SXM5")
    first = scenario.sweep[0] | {"workload.requests": 2}
    return scenario.model_copy(update={"sweep": (first,), "repeats": 1}), get_hardware("H100-SXM5")


def _kept(store: Store, asked: tuple[Scenario, HardwareSpec], producer: str) -> Run:
    """A comparison whose measured runs somebody made; their times are the simulator's."""
    scenario, hardware = asked
    predicted = predict_rows(scenario, hardware)
    measured = {key: [_by(run, producer=producer)] for key, run in predicted.predicted.items()}
    rows = [row.model_copy(update={"measured": row.predicted}) for row in predicted.rows]
    return store.run(keep_comparison(store, scenario, ComparisonResult(rows, predicted.predicted, measured)))


def test_what_a_server_measured_is_no_run_of_this_machine(store: Store, h100: tuple[Scenario, HardwareSpec]) -> None:
    served, local = _kept(store, h100, "endpoint"), _kept(store, h100, "runtime")
    assert not served.measured_here() and served.measurers() == {"endpoint"}
    assert local.measured_here()
    rows, unread = judged.of_runs([served])
    assert rows.empty and unread == 0
    assert len(judged.of_runs([served, local])[0]) == len(judged.of_runs([local])[0]) > 0
    assert {one.run_id for one in measured_gains(h100[0].model, "local")} == {local.id}


def test_a_comparison_without_measurements_is_measured_by_nobody(
    store: Store, h100: tuple[Scenario, HardwareSpec]
) -> None:
    run = store.run(keep_comparison(store, h100[0], predict_rows(*h100)))
    assert not run.measured_here() and run.measurers() == set()


# --- two runs together ---


def _engine(store: Store, rate: float, techniques: Sequence[Technique], provenance: Any = None, **fields: Any) -> str:
    scenario = load_scenario("live-cpu").model_copy(update={"sweep": (), "techniques": tuple(techniques)})
    return store.save_run(
        kind="measure", label="r", digest="d", scenario_yaml=scenario.with_values(fields).to_yaml(),
        summary={"tpot_s": {"mean": 1 / rate}, "output_tokens_per_s": rate},
        comparison={"provenance": provenance or {"producer": "runtime"}},
    )  # fmt: skip


def _together(*added: str) -> float | None:
    found = measured_together(CHOICE, ["continuous_batching"], added)
    return None if found is None else found.rate


def test_two_runs_that_differ_in_techniques_alone_are_a_gain(store: Store) -> None:
    _engine(store, 100.0, [ContinuousBatching()])
    _engine(store, 150.0, [ContinuousBatching(), Int8Weights()])
    assert _together("int8_weights") == pytest.approx(1.5)
    assert _together("weight_quantization") is None


@pytest.mark.parametrize(
    "fields",
    [
        {"hardware": "H100-SXM5"},
        {"weights": "random"},
        {"engine.max_batched_tokens": 512},
        {"parallel.tp": 2},
        {"workload.seed": 9},
        {"temperature": 0.5},
    ],
)
def test_two_runs_that_differ_in_anything_else_are_none(store: Store, fields: dict[str, Any]) -> None:
    _engine(store, 100.0, [ContinuousBatching()])
    _engine(store, 150.0, [ContinuousBatching(), Int8Weights()], **fields)
    assert _together("int8_weights") is None


def test_a_run_of_a_server_is_not_paired_with_one_of_this_machine(store: Store) -> None:
    _engine(store, 100.0, [ContinuousBatching()])
    served = {"producer": "endpoint", "endpoint": {"tool": "vllm"}}
    _engine(store, 150.0, [ContinuousBatching(), Int8Weights()], served)
    assert _together("int8_weights") is None


def test_two_runs_are_paired_in_the_formats_that_were_chosen(store: Store) -> None:
    _engine(store, 100.0, [ContinuousBatching()])
    _engine(store, 150.0, [ContinuousBatching(), KvQuantization(format="int4")])
    assert measured_together(replace(CHOICE, kv="int8"), ["continuous_batching"], ["kv_quantization"]) is None
    assert measured_together(replace(CHOICE, kv="int4"), ["continuous_batching"], ["kv_quantization"]) is not None


def test_a_simulated_run_is_not_measured(store: Store) -> None:
    scenario = load_scenario("live-cpu").model_copy(update={"sweep": (), "hardware": "H100-SXM5"})
    run = store.run(keep_run(store, "simulate", scenario, simulate(scenario)))
    assert not run.measured_here()
