"""Calibration refuses what does not repeat, fits what it measured, and gives a whole calibration on a small plan."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from membound.app.i18n import sentences
from membound.kernels.bench.benchmark import Timer, cuda_timer, rows_within
from membound.kernels.bench.trial import Run
from membound.kernels.dispatch import kernels_for
from membound.kernels.reference import TorchKernels
from membound.roofline.hardware.calibration import attention_over
from membound.roofline.models import get_model
from membound.roofline.models.recurrent import Mamba2
from membound.roofline.scenario import load_scenario
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import EngineSetup
from membound.runtime.calibration import passes
from membound.runtime.calibration.bandwidth import BandwidthProbe
from membound.runtime.calibration.calibrate import (
    QUICK,
    AttentionCheck,
    CalibrationError,
    CalibrationPlan,
    LinearCheck,
    calibrate,
)
from membound.runtime.calibration.host import HostGrid
from membound.runtime.calibration.layers import LAYER_KINDS, LayerGrid
from membound.runtime.calibration.linears import LinearGrid, LinearProbe
from membound.runtime.calibration.memory_watch import MemoryWatch
from membound.runtime.calibration.operators import Heads, Load, OperatorGrid, attention_amounts, fit
from membound.runtime.calibration.passes import Part, repeat
from membound.runtime.calibration.pool import PackedLayout, Pool
from membound.runtime.calibration.stopwatch import Stopwatch, rows_timer_of

MIB = 2**20


def _part(*seconds: float) -> Part:
    """A part whose passes give these seconds in turn."""
    values = iter(seconds)

    def measure() -> Iterator[float]:
        yield next(values)

    return Part("the bandwidth of memory", 1, measure)


class FakeRows:
    """Stands for the timer of a GPU: each row of calls takes 1, 2 and 9 ms a call."""

    def __init__(self, problem: Exception | None = None, *, plays: bool = True) -> None:
        self.problem = problem
        self.plays = plays
        self.budgets_s: list[float] = []
        self.results: list[object] = []

    def __call__(self, budget_s: float) -> Timer:
        self.budgets_s.append(budget_s)

        def time_rows(runs: Sequence[Run]) -> list[float]:
            if self.problem is not None:
                raise self.problem
            self.results = [run() for run in runs] if self.plays else []
            return [9e-3, 1e-3, 2e-3]

        return time_rows


def test_a_gpus_calls_are_timed_by_the_bench_as_graphs_and_a_cpus_one_by_one() -> None:
    assert rows_timer_of(torch.device("cpu")) is None
    assert rows_timer_of(torch.device("cuda")).func is cuda_timer  # type: ignore[union-attr]
    rows, kernels = FakeRows(), TorchKernels()
    stopwatch = Stopwatch(kernels, "cpu", rows)
    given = torch.ones(3)
    calls = [lambda x, i=i: (i, x) for i in range(4)]
    assert stopwatch.time_s(calls, lambda: given, 0.5) == 2e-3  # type: ignore[arg-type]
    assert rows.budgets_s == [0.5]
    assert rows.results == [(i, given) for i in range(4)]
    probe = BandwidthProbe(kernels, Stopwatch(kernels, "cpu", FakeRows(plays=False)), Pool.of(MIB, "cpu"))
    assert list(probe.measure([MIB])) == [2e-3 / 2**25]  # the fastest reader reads 32 MiB a call


def test_kernels_that_cannot_be_captured_are_timed_with_their_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    refused = FakeRows(RuntimeError("operation not permitted when stream is capturing"))
    seconds = Stopwatch(TorchKernels(), "cpu", refused).time_s([lambda _: time.sleep(1e-3)], lambda: None, 1e-3)
    assert seconds > 1e-3 and len(waits) >= 6


@pytest.mark.parametrize(
    ("budget_s", "row_s", "rows"), [(math.inf, 1.0, 30), (1.0, 0.1, 10), (1.0, 1.0, 3), (1.0, 0, 30)]
)
def test_a_budget_bounds_the_rows_of_the_timer(budget_s: float, row_s: float, rows: int) -> None:
    assert rows_within(budget_s, row_s) == rows


def _silent(fraction: float, text: str) -> None:
    pass


def test_two_passes_that_agree_are_enough() -> None:
    part = _part(1.0, 1.1)
    assert repeat([part], _silent).difference == pytest.approx(0.1)
    assert len(part.passes) == 2


def test_a_part_that_never_repeats_is_refused_with_how_much_and_what_to_do() -> None:
    with pytest.raises(CalibrationError, match=r"two measurements of the bandwidth of memory differ by 40%, more than"):
        repeat([_part(1.0, 1.1), _part(1.0, 1.4, 2.0, 3.0)], _silent)


def test_the_refusal_says_to_close_other_programs() -> None:
    with pytest.raises(CalibrationError, match="after 3 attempts; close other programs and run `membound calibrate`"):
        repeat([_part(1.0, 2.0, 4.0, 8.0)], _silent)


def test_a_disturbed_pass_is_measured_again_and_only_it() -> None:
    disturbed, calm = _part(1.0, 3.0, 1.05), _part(1.0, 1.0)
    assert repeat([disturbed, calm], _silent).difference == pytest.approx(0.05)
    assert (len(disturbed.passes), len(calm.passes)) == (3, 2)
    assert disturbed.typical() == pytest.approx([1.025])
    assert disturbed.best() == pytest.approx([1.0])


class FakeWatch(MemoryWatch):
    """Memory that gives these rates in turn, the last for ever."""

    def __init__(self, *rates: float) -> None:
        self.rates = list(rates)
        self.waited_for: list[float] = []

    def rate(self) -> float:
        return self.rates.pop(0) if len(self.rates) > 1 else self.rates[0]

    def settled(self, expected: float, patience_s: float) -> float:
        self.waited_for.append(expected)
        return 0.0


def test_a_value_measured_while_memory_was_in_a_rare_state_is_measured_again_and_does_not_count() -> None:
    steady, changed = _part(1.0, 1.02), _part(2.0, 1.3, 2.04)
    # two rates a pass: the second pass of `changed` begins and ends while memory gives twice as much, as does the third
    # until it is waited for
    watch = FakeWatch(35.0, 35.0, 36.0, 34.0, 35.0, 33.0, 65.0, 66.0, 65.0, 35.0)
    repeated = repeat([steady, changed], _silent, watch, more_time=1e6)
    assert watch.waited_for == [35.0] and repeated.memory_rate == 35.0
    assert repeated.unsettled == () and repeated.difference == pytest.approx(0.02)
    assert changed.typical() == pytest.approx([2.02])


def test_only_values_in_another_state_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "WATCH_EVERY_S", -1.0)  # each value has rates of its own
    values = iter([[1.0, 10.0], [1.1, 6.0], [1.05, 10.4]])
    part = Part("two sizes", 2, lambda: iter(next(values)))
    # four rates a pass, the last behind its last value: the second value of the second pass ends at 65
    watch = FakeWatch(*[35.0] * 6, 65.0, 35.0)
    assert repeat([part], _silent, watch, more_time=1e6).unsettled == ()
    assert part.typical() == pytest.approx([1.05, 10.2])


def test_a_state_that_does_not_come_back_is_waited_for_no_longer_than_allowed_and_told() -> None:
    part, other = _part(1.0, 1.1), _part(1.0, 1.0)
    repeated = repeat([part, other], _silent, FakeWatch(35.0, 35.0, 35.0, 35.0, 65.0), more_time=0.0)
    assert repeated.unsettled == (part.name, other.name)
    assert repeated.difference == pytest.approx(0.1)  # of the passes that there are


def test_a_part_that_repeats_in_another_state_alone_is_taken_from_there() -> None:
    fickle, steady = _part(1.0, 1.4, 1.43), _part(1.0, 1.0)
    watch = FakeWatch(*[35.0] * 8, 65.0)
    repeated = repeat([fickle, steady], _silent, watch)
    assert repeated.difference == pytest.approx(1.43 / 1.4 - 1)
    assert watch.waited_for == [35.0], "it is waited for before the part is measured again"


def test_memory_that_others_disturb_all_the_time_has_no_state_to_wait_for() -> None:
    watch = FakeWatch(4.0, 9.0, 12.0, 3.0, 50.0, 20.0, 7.0, 30.0)
    repeated = repeat([_part(1.0, 1.1), _part(1.0, 1.0)], _silent, watch)
    assert watch.waited_for == [] and repeated.memory_rate is None and repeated.unsettled == ()
    assert repeated.difference == pytest.approx(0.1)


def test_memory_is_watched_with_reads_that_take_as_long_as_their_bytes() -> None:
    watch = MemoryWatch(buffer_bytes=16 * MIB)
    assert 1e8 < watch.rate() < 1e13
    start_s = time.perf_counter()
    watch.settled(1.0, patience_s=0.3)  # bytes/s that no memory has
    assert 0.3 <= time.perf_counter() - start_s < 30


def test_a_value_that_no_pass_has_stays_missing() -> None:
    part = Part("x", 2, lambda: iter([1.0, float("nan")]))
    repeat([part], _silent)
    assert np.isnan(part.typical()).tolist() == [False, True]


def test_progress_never_falls_and_names_the_part() -> None:
    heard: list[tuple[float, str]] = []
    repeat([_part(1.0, 1.0), _part(2.0, 2.0)], lambda fraction, text: heard.append((fraction, text)))
    fractions = [fraction for fraction, _ in heard]
    assert fractions == sorted(fractions) and fractions[0] >= 0 and fractions[-1] <= 1
    assert heard[0][1] == "the bandwidth of memory, pass 1 of 2"


def test_a_fit_finds_the_seconds_that_its_samples_were_made_of() -> None:
    amounts = [
        attention_amounts(Heads(8, 2, 64), Load(s, c, q), 4.0) for s in (1, 8) for c in (64, 640) for q in (1, 5)
    ]
    seconds = [1e-5 + 2e-6 * a["sequences"] + 6e-11 * a["kv_bytes"] + 5e-12 * a["flops"] for a in amounts]
    cost = fit(amounts, seconds)
    assert [cost.time_s(**a) for a in amounts] == pytest.approx(seconds, rel=1e-6)
    assert min(cost.seconds.values()) >= 0


def test_the_amounts_of_an_attention_are_those_of_the_operator_in_a_step() -> None:
    model = get_model("SmolLM2-135M")
    a = model.attention
    amounts = attention_amounts(Heads(a.heads, a.kv_heads, a.head_dim), Load(4, 100, 5), 4.0)
    operator = next(
        op for op in step_operators(model, EngineSetup(), StepShape.verify(4, 100, 4)) if op.kind == "attention"
    )
    assert {name: getattr(operator, name) for name in amounts} == amounts


def test_cells_that_were_not_measured_take_the_efficiency_of_a_smaller_shape() -> None:
    kernels = TorchKernels("cpu")
    grid = LinearGrid(n=(256, 512), k=(256, 512), m=(1, 2))
    probe = LinearProbe(kernels, Stopwatch(kernels, "cpu"), Pool.of(MIB, "cpu"), grid)
    memory = np.array([1.0, 2.0, 2.0, 4.0, 2.0, 4.0, np.nan, np.nan])
    table = probe.table(memory, memory * 2)
    assert table.memory_s[1][1] == [4.0, 8.0]
    assert table.cache_s == table.memory_s, "a cached weight is never slower"


def test_parts_of_a_pool_come_in_turn_and_cached_ones_repeat() -> None:
    pool = Pool.of(64 * 4096, "cpu")
    first, second = (pool.parts(4096, 40) for _ in range(2))
    starts = [part.data_ptr() - pool.bytes.data_ptr() for part in first + second]
    assert starts == [4096 * (i % 64) for i in range(80)]
    assert len({part.data_ptr() for part in pool.parts(4096, 40, within_bytes=8192)}) == 2


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8", "int4", "w8a8", "w4a8", "fp8", "sparse24"])
@pytest.mark.parametrize(("n", "k"), [(256, 256), (48, 128)])
def test_a_pools_weights_are_laid_out_as_packed_ones_and_are_multiplied(format: str, n: int, k: int) -> None:
    kernels, pool = kernels_for("cpu"), Pool.of(8 * MIB, "cpu")
    assert PackedLayout.fits(kernels, format, k)
    packed = kernels.pack(torch.randn(n, k), format)
    layout = PackedLayout.of(kernels, format, n, k)
    assert 0 <= layout.nbytes - packed.nbytes < 64 * len(layout.shapes)
    for weight in pool.weights(kernels, format, n, k, 3):
        assert weight.shape == packed.shape and weight.nbytes == packed.nbytes
        y = kernels.linear(torch.ones(2, k, dtype=kernels.activation_dtype), weight)
        assert y.shape == (2, n) and bool(y.isfinite().all())


SMALL = CalibrationPlan(
    working_sets=(MIB, 16 * MIB, 64 * MIB),
    linears=LinearGrid(formats=("bf16", "int8"), n=(256, 1024), k=(256, 1024), m=(1, 2, 8)),
    operators=OperatorGrid(
        tokens=(1, 8, 64),
        widths=(512,),
        heads=(Heads(4, 2, 64), Heads(8, 2, 64)),
        loads=(Load(1, 64), Load(4, 128), Load(1, 32, 32)),
    ),
    host=HostGrid(sequences=(1, 4), vocab=(1024,), drafts=(0, 2), steps=4),
    layers=LayerGrid(
        tokens=(1, 8),
        hidden=(128,),
        experts=((4, 2),),
        states=(Mamba2(heads=2, head_dim=16, d_state=16),),
        whole_layers=1,
    ),
    checks=(LinearCheck(700, 300, 1), AttentionCheck(Heads(6, 3, 64), Load(2, 96))),
    pool_bytes=64 * MIB,
)


@pytest.mark.slow
def test_a_small_plan_gives_a_whole_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "TOLERANCE", 100.0)  # other tests may hold the cores
    heard: list[float] = []
    found = calibrate(plan=SMALL, progress=lambda fraction, text: heard.append(fraction))
    assert found.kind == "cpu" and found.machine and found.versions.keys() >= {"python", "torch"}
    assert [point.working_set_bytes for point in found.bandwidth] == list(SMALL.working_sets)
    assert set(found.linear) == {"bf16", "int8"}
    table = found.linear["bf16"]
    assert (np.array(table.cache_s) <= np.array(table.memory_s)).all()
    kinds = {op.kind for op in step_operators(get_model("SmolLM2-135M"), EngineSetup(), StepShape.decode(1, 10))}
    quantized = {attention_over(format) for format in ("int8", "int4", "fp8")}
    assert set(found.operators) - quantized == (kinds - {"linear"}) | set(LAYER_KINDS)
    assert quantized <= set(found.operators) or kernels_for("cpu").emulates_quantized_kv
    assert heard == sorted(heard) and heard[-1] == 1.0
    assert type(found).model_validate_json(found.model_dump_json()) == found


def test_a_quick_plan_has_all_that_the_first_look_needs_and_a_fifth_of_the_sizes() -> None:
    scenario = load_scenario("live-cpu")
    model = get_model(scenario.model)
    setups = [EngineSetup(), *(one.apply(EngineSetup()) for one in scenario.techniques)]
    operators = [op for setup in setups for op in step_operators(model, setup, StepShape.decode(16, 300))]
    assert {op.kind for op in operators} - {"linear"} <= {*QUICK.kinds, "host"}
    assert {setup.weights.name for setup in setups} <= set(QUICK.linears.formats)
    plans = QUICK, CalibrationPlan()
    linears = [plan.linears.size * len(plan.linears.formats) for plan in plans]
    attentions = [len(plan.operators.loads) * len(plan.operators.heads) for plan in plans]
    for quick, whole in (linears, attentions):
        assert quick < whole / 4
    assert sentences("en")["says.quickly"] == QUICK.note
