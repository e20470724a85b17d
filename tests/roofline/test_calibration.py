"""A calibration is read back as it was written, and a damaged one is refused with one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from membound.roofline.cost import step_cost
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import hardware_of
from membound.roofline.hardware.calibration import BandwidthPoint, Calibration, LinearCost, LinearTable, attention_over
from membound.roofline.models import get_model
from membound.roofline.shape import StepShape
from membound.roofline.techniques import (
    W8A8,
    Int8Weights,
    KvQuantization,
    Technique,
    WeightQuantization,
    engine_setup,
)
from membound.roofline.times.calibrated import CalibratedTimes


@pytest.fixture
def calibration() -> Calibration:
    seconds = [[[1e-5, 2e-5], [2e-5, 4e-5]], [[2e-5, 4e-5], [4e-5, 8e-5]]]
    return Calibration(
        created="2026-11-29T12:00:00+00:00",
        machine="test",
        kind="cpu",
        threads=2,
        kernels="test",
        versions={"torch": "2.13.0"},
        memory_bytes=2**34,
        bandwidth=[
            BandwidthPoint(working_set_bytes=2**30, bytes_per_s=30e9),
            BandwidthPoint(working_set_bytes=2**20, bytes_per_s=90e9),
        ],
        linear={"bf16": LinearTable(n=[256, 512], k=[256, 512], m=[1, 2], memory_s=seconds, cache_s=seconds)},
        operators={"rms_norm": LinearCost(seconds={"call": 1e-6, "elements": 1e-10})},
        repeatability=0.05,
        residual=0.08,
    )


def test_a_saved_calibration_reads_back_equal(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "calibration" / "local.json"
    calibration.save(path)
    assert Calibration.load(path) == calibration
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 2}'])
def test_a_damaged_calibration_says_what_to_do(text: str, tmp_path: Path) -> None:
    path = tmp_path / "local.json"
    path.write_text(text)
    with pytest.raises(MemboundError, match=r"is damaged or from another version .* run `membound calibrate`"):
        Calibration.load(path)


def test_a_truncated_calibration_is_damaged(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "local.json"
    calibration.save(path)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(MemboundError, match="damaged"):
        Calibration.load(path)


def test_a_missing_calibration_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MemboundError, match="is missing; run `membound calibrate`"):
        Calibration.load(tmp_path / "local.json")


def test_bandwidth_holds_at_its_points_and_beyond_their_ends(calibration: Calibration) -> None:
    assert calibration.bandwidth_at(2**20) == calibration.bandwidth_at(1) == pytest.approx(90e9)
    assert calibration.bandwidth_at(2**30) == calibration.bandwidth_at(2**40) == pytest.approx(30e9)
    assert calibration.bandwidth_at(2**25) == pytest.approx(60e9)
    assert calibration.memory_bandwidth == 30e9


def test_the_matrix_rate_is_the_best_of_the_table(calibration: Calibration) -> None:
    assert calibration.matrix_flops("bf16") == pytest.approx(2 * 256 * 256 / 1e-5)


def test_a_table_of_another_shape_than_its_grid_is_refused() -> None:
    with pytest.raises(ValidationError, match="memory_s has shape"):
        LinearTable(n=[1, 2], k=[1, 2], m=[1], memory_s=[[[1.0]]], cache_s=[[[1.0], [1.0]], [[1.0], [1.0]]])


def test_a_cost_sums_its_terms_and_ignores_amounts_without_one() -> None:
    cost = LinearCost(seconds={"call": 2.0, "elements": 3.0})
    assert cost.time_s(elements=10.0, flops=5.0) == 32.0


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("operators", "rms_norm", "seconds", "call"), -1.0, "rms_norm.seconds.call' is -1.0"),
        (("linear", "bf16", "n"), [256, 128], "n is \\[256, 128\\]"),
        (("linear", "bf16", "memory_s"), [[[0.0, 1.0]] * 2] * 2, "memory_s has 0 seconds"),
        (("bandwidth",), [{"working_set_bytes": 1, "bytes_per_s": 1e9}], "bandwidth"),
    ],
)
def test_a_calibration_that_holds_nonsense_names_it(
    calibration: Calibration, tmp_path: Path, keys: tuple[str, ...], value: object, said: str
) -> None:
    document = calibration.model_dump(mode="json")
    node = document
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    path = tmp_path / "local.json"
    path.write_text(json.dumps(document))
    with pytest.raises(MemboundError, match=f"local.json' is damaged.*{said}"):
        Calibration.load(path)


def slower(table: LinearTable) -> LinearTable:
    seven_times = {name: (7 * np.array(getattr(table, name))).tolist() for name in ("memory_s", "cache_s")}
    return table.model_copy(update=seven_times)


def test_weights_and_caches_of_every_kernel_have_their_own_tables() -> None:
    """Each format has a table, with inputs in int8 another one; the cache's format chooses its attention."""
    plain = Calibration.model_validate_json((Path(__file__).parents[1] / "app" / "calibration.json").read_bytes())
    tables = plain.linear | {"int4": slower(plain.linear["bf16"]), "w8a8": slower(plain.linear["int8"])}
    tables["w4a8"] = slower(tables["int4"])
    faster = LinearCost(seconds={term: seconds / 2 for term, seconds in plain.operators["attention"].seconds.items()})
    richer = plain.model_copy(
        update={"linear": tables, "operators": plain.operators | {attention_over("int8"): faster}}
    )
    times = CalibratedTimes(hardware_of(richer), richer)
    model, shape = get_model("SmolLM2-135M"), StepShape.decode(1, 512)

    def seconds(*techniques: Technique) -> dict[str, float]:
        cost = step_cost(model, engine_setup(techniques), times, shape)
        return {one.operator.name: float(one.total_s) for one in cost.operators}

    bf16, int4 = seconds(), seconds(WeightQuantization(format="int4"))
    assert int4["gate_up"] > bf16["gate_up"] and int4["attention"] == bf16["attention"]
    assert seconds(W8A8(format="int8"))["gate_up"] > seconds(Int8Weights())["gate_up"]
    narrow_inputs = seconds(WeightQuantization(format="int4", activations="int8", lm_head="int8"))
    assert narrow_inputs["gate_up"] > int4["gate_up"] and narrow_inputs["lm_head"] > int4["lm_head"]
    assert seconds(KvQuantization(format="int8"))["attention"] < bf16["attention"]
    with pytest.raises(MemboundError, match="no fp8 weights"):
        seconds(WeightQuantization(format="fp8"))
