"""Do the figures obey the physics that they show, and are they readable without colour?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from membound.app.figures import comparison, live, memory, moving_roofline, roofline, sweep
from membound.app.figures.template import BOUND_COLORS, BOUND_MARKS, BOUND_SYMBOLS
from membound.app.i18n import Translate
from membound.roofline import hardware, models
from membound.roofline.hardware.calibration import Calibration
from membound.roofline.memory import MemoryBreakdown
from membound.roofline.operating_point import PHASES, OperatingPoint, Phase
from membound.roofline.results.comparison import Comparison
from membound.roofline.results.result import BOUNDS
from membound.roofline.techniques import EngineSetup

T = Translate("en")


@pytest.fixture(params=["H100-SXM5", "A10G", "local"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> hardware.HardwareSpec:
    monkeypatch.setattr(
        hardware.devices, "local_calibration_path", lambda: Path(__file__).with_name("calibration.json")
    )
    return hardware.get_hardware(request.param)


def _point(device: hardware.HardwareSpec, phase: Phase = "decode", batch: int = 4) -> OperatingPoint:
    return OperatingPoint(models.get_model("SmolLM2-135M"), device, EngineSetup(), phase, batch, 512)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("batch", [1, 16, 256])
def test_every_operator_lies_under_the_roofs(device: hardware.HardwareSpec, phase: Phase, batch: int) -> None:
    roofs = roofline.roofs_of(device)
    for op in _point(device, phase, batch).cost.operators:
        if op.operator.flops:
            intensity = float(op.operator.flops / op.operator.bytes)
            roof = min(max(roofs.rates.values()), intensity * max(roofs.bandwidths.values()))
            assert roofline.rate_of(op) <= roof * 1.001, op.operator.name


def test_every_operator_with_flops_is_on_the_chart_with_the_symbol_of_its_bound(device: hardware.HardwareSpec) -> None:
    cost = _point(device).cost
    fig = roofline.roofline_figure(roofline.roofs_of(device), [roofline.PlacedStep("s", "", cost)], T)
    drawn = {
        name: trace.marker.symbol for trace in fig.data if trace.customdata is not None for name in trace.customdata
    }
    expected = {op.operator.name: f"{BOUND_SYMBOLS[op.bound]}-open" for op in cost.operators if op.operator.flops}
    assert drawn == expected


def test_labels_name_what_takes_long_and_count_the_rest() -> None:
    point = OperatingPoint(
        models.get_model("DeepSeek-V3"), hardware.get_hardware("H200-SXM"), EngineSetup(), "decode", 64, 4096
    )
    steps = [roofline.PlacedStep("s", "", point.cost)]
    fig = roofline.roofline_figure(roofline.roofs_of(point.hardware), steps, T)
    (labels,) = [trace.text for trace in fig.data if trace.mode == "text"]
    longest = max(point.cost.operators, key=lambda op: float(op.total_s))
    assert any(longest.operator.name in label for label in labels)
    assert all(label.count(",") < roofline.MOST_NAMES for label in labels)


def _places(device: hardware.HardwareSpec) -> list[moving_roofline.Place]:
    points = [_point(device, batch=batch) for batch in (1, 8, 512)]
    return [moving_roofline.Place(point.batch, (roofline.PlacedStep("s", "", point.cost),)) for point in points]


def test_the_slider_moves_the_step_to_where_it_would_be_drawn(device: hardware.HardwareSpec) -> None:
    """Every frame is the figure of its batch, trace by trace."""
    places = _places(device)
    fig = moving_roofline.moving_figure(roofline.roofs_of(device), places, 8, T)
    assert [frame.name for frame in fig.frames] == ["1", "8", "512"]
    assert [step.label for step in fig.layout.sliders[0].steps] == ["1", "8", "512"]
    assert fig.layout.sliders[0].steps[fig.layout.sliders[0].active].label == "8"
    for place, frame in zip(places, fig.frames, strict=True):
        still = moving_roofline.moving_figure(roofline.roofs_of(device), places, place.batch, T)
        assert len(frame.data) == len(frame.traces)
        for index, moved in zip(frame.traces, frame.data, strict=True):
            for key in ("x", "y", "text", "hovertext", "customdata"):
                assert moved[key] == still.data[index][key]
            assert moved.marker.size is None or moved.marker.size == still.data[index].marker.size


def test_the_slider_says_what_the_step_takes_and_what_binds_it(device: hardware.HardwareSpec) -> None:
    places = _places(device)
    fig = moving_roofline.moving_figure(roofline.roofs_of(device), places, 1, T)
    for place, frame in zip(places, fig.frames, strict=True):
        (said,) = frame.data[-1].text
        cost = place.steps[-1].cost
        assert str(place.batch) in said and BOUND_MARKS[cost.bottleneck] in said
        assert T(f"bound.{cost.bottleneck}") in said


def test_axes_do_not_move_with_the_operating_point(device: hardware.HardwareSpec) -> None:
    figures = [
        roofline.roofline_figure(roofline.roofs_of(device), [roofline.PlacedStep("s", "", point.cost)], T)
        for point in (_point(device, batch=1), _point(device, "prefill", 64))
    ]
    for axis in ("xaxis", "yaxis"):
        assert figures[0].layout[axis].range == figures[1].layout[axis].range


def test_a_datasheet_roof_is_dotted_and_a_calibrated_one_solid(device: hardware.HardwareSpec) -> None:
    fig = roofline.roofline_figure(roofline.roofs_of(device), [], T)
    dashes = {trace.line.dash for trace in fig.data}
    assert dashes == {"solid" if device.calibration else "dot"}


@pytest.mark.parametrize("name", list(hardware.catalog()))
def test_every_device_of_the_catalog_has_roofs_to_draw(name: str) -> None:
    roofs = roofline.roofs_of(hardware.get_hardware(name))
    fig = roofline.roofline_figure(roofs, [], T)
    assert len(fig.data) == len(roofs.bandwidths) + len(roofs.rates) >= 2


def test_a_calibrated_cpu_has_a_roof_for_its_cache_above_that_of_memory() -> None:
    calibration = Calibration.load(Path(__file__).with_name("calibration.json"))
    spec = hardware.get_hardware("A10G").model_copy(update={"calibration": calibration})
    roofs = roofline.roofs_of(spec)
    assert roofs.bandwidths["cache"] > roofs.bandwidths["memory"] == calibration.memory_bandwidth


def test_memory_parts_fill_the_device_and_nothing_is_free_when_it_does_not_fit() -> None:
    fits = memory.memory_parts(MemoryBreakdown(10.0, 5.0, 1.0), 20.0)
    assert sum(fits.values()) == pytest.approx(20.0) and fits["free"] == pytest.approx(4.0)
    assert memory.memory_parts(MemoryBreakdown(30.0, 5.0, 1.0), 20.0)["free"] == 0.0


def test_the_sweep_agrees_with_the_point_that_is_shown(device: hardware.HardwareSpec) -> None:
    point = _point(device)
    at_batch = next(p for p in point.sweep() if p.batch == point.batch)
    assert at_batch.time_s == float(point.cost.time_s)
    assert at_batch.tokens_per_s == pytest.approx(point.tokens_per_s)
    assert at_batch.low_s <= at_batch.time_s <= at_batch.high_s


def test_a_datasheet_sweep_stays_under_both_roofs() -> None:
    for p in _point(hardware.get_hardware("H100-SXM5")).sweep():
        assert p.tokens_per_s <= min(p.memory_roof_tokens_per_s, p.compute_roof_tokens_per_s)


def test_the_sweep_ends_where_memory_ends() -> None:
    big = OperatingPoint(
        models.get_model("Llama-3.1-8B"), hardware.get_hardware("A10G"), EngineSetup(), "decode", 1, 8192
    )
    batches = [p.batch for p in big.sweep()]
    assert big.with_batch(batches[-1]).fits and not big.with_batch(batches[-1] * 2).fits


def test_the_next_bound_is_the_one_that_holds_at_that_batch() -> None:
    point = OperatingPoint(
        models.get_model("Llama-3.1-8B"), hardware.get_hardware("H100-SXM5"), EngineSetup(), "decode", 1, 2048
    )
    change = point.next_bound()
    assert change is not None
    batch, bound = change
    assert point.with_batch(batch).cost.bottleneck == bound != point.cost.bottleneck


def test_a_verify_step_must_yield_more_than_a_token_to_pay() -> None:
    point = _point(hardware.get_hardware("H100-SXM5"), "verify", 64)
    assert point.breakeven_tokens() > 1


def row(technique: str = "int8_weights", measured: float | None = 1.7, **changes: Any) -> Comparison:
    """A comparison's row as a worker sends it."""
    fields: dict[str, Any] = {
        "technique": technique, "baseline": "bf16 weights", "metric": "tpot_s", "unit": "ratio",
        "point": {"workload.arrivals.concurrency": 4}, "predicted": 1.8, "low": 1.6, "high": 2.0, "measured": measured,
        "spread": None if measured is None else 0.05, "error": None if measured is None else 1.8 / measured - 1,
        "verdict": "not measured" if measured is None else "gain", "lossless": False, "quality": None,
        "bottleneck_before": "memory_weights", "bottleneck_after": "compute", "samples": [], "conditions": "a test",
    }  # fmt: skip
    return Comparison.model_validate(fields | changes)


def test_predicted_is_hollow_and_measured_is_solid() -> None:
    fig = comparison.gains_figure([row()], T)
    predicted, measured = fig.data
    assert predicted.marker.symbol.endswith("-open") and not measured.marker.symbol.endswith("-open")
    assert measured.error_y.array == (0.05,)


def test_what_was_not_measured_has_no_marker() -> None:
    fig = comparison.gains_figure([row(measured=None)], T)
    assert len(fig.data[0].y) == 1 and len(fig.data[1].y) == 0


def test_each_point_of_the_sweep_has_its_panel_and_axes_are_shared() -> None:
    rows = [row(point={"workload.arrivals.concurrency": users}) for users in (1, 4, 16)]
    fig = comparison.gains_figure(rows, T)
    assert [a.text for a in fig.layout.annotations if "users" in (a.text or "")] == [
        "users: 1",
        "users: 4",
        "users: 16",
    ]
    assert fig.layout.yaxis2.matches == "y"


def test_many_techniques_lie_below_each_other_at_the_same_place_in_every_panel() -> None:
    names = ["int8_weights", "w8a8 int8", "continuous_batching + int8_weights", *(f"setting {i}" for i in range(5))]
    rows = [
        row(name, point={"workload.arrivals.concurrency": users}) for users in (1, 4) for name in names[users // 4 :]
    ]
    fig = comparison.gains_figure(rows, T)
    assert fig.layout.yaxis.ticktext[2] == "continuous batching + 8-bit weights"
    places = dict(zip(fig.layout.yaxis.ticktext, fig.layout.yaxis.tickvals, strict=True))
    assert len(places) == len(names) and fig.layout.height > 30 * len(names)
    for trace in fig.data:
        assert set(trace.x) <= {1.8, row().measured} and trace.error_x.array is not None
    first, second = fig.data[0], fig.data[2]
    assert list(first.y[1:]) == list(second.y)


def test_a_technique_of_the_registry_has_its_title_with_or_without_a_translation() -> None:
    assert comparison.technique_title("int8_weights", T) == "8-bit weights"
    assert comparison.technique_title("int8_weights", Translate("zh")) == "8 位权重（8-bit weights）"
    assert comparison.technique_title("baseline", T) == "plain engine"
    measured = "medusa heads 3 tree_size 6 guessable 4096 alpha 0.195 decay 0.54 rank_exponent 0.23"
    assert comparison.technique_title(measured, T) == "Medusa heads 3 deep, tree of 6"
    narrow = "weight_quantization int4 int8 activations lm_head int8 gptq"
    assert comparison.technique_title(narrow, T) == "weight quantization int4, int8 activations, lm_head int8, GPTQ"
    assert comparison.technique_title("int8_weights + ngram_speculation gamma 4", T) == (
        "8-bit weights + n-gram speculation 4 guesses"
    )
    assert comparison.technique_title("weight_quantization int4 gptq", T) == "weight quantization int4, GPTQ"


def test_a_long_run_is_thinned_and_keeps_its_newest_point() -> None:
    points = [(float(i), {"tokens_per_s": 1.0}) for i in range(10_007)]
    kept = live.thinned(points)
    assert len(kept) <= live.MOST_POINTS and kept[-1] == points[-1]


def test_a_live_figure_of_nothing_has_its_axes() -> None:
    assert live.live_figure([], T).layout.xaxis is not None


def test_every_axis_names_its_quantity() -> None:
    point = _point(hardware.get_hardware("H100-SXM5"))
    figures = [
        roofline.roofline_figure(roofline.roofs_of(point.hardware), [], T),
        memory.memory_figure(point.memory, 1e11, "device", T),
        sweep.time_figure(point.sweep(), 4, T),
        sweep.rate_figure(point.sweep(), 4, T),
        comparison.gains_figure([row()], T),
        comparison.baseline_figure([row("baseline")], T),
    ]
    for fig in figures[:4]:
        assert fig.layout.xaxis.title.text
    for fig in (figures[0], *figures[2:]):
        assert fig.layout.yaxis.title.text


def test_every_bound_has_a_colour_a_symbol_and_a_mark_of_its_own() -> None:
    for table in (BOUND_COLORS, BOUND_SYMBOLS, BOUND_MARKS):
        assert set(BOUNDS) <= set(table) and len(set(table.values())) == len(table)


def test_figures_travel_as_json_without_anything_infinite() -> None:
    point = _point(hardware.get_hardware("H100-SXM5"), "prefill", 1024)
    document = sweep.rate_figure(point.sweep(), 1024, T).to_json()
    assert "Infinity" not in document and "NaN" not in document
