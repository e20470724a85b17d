"""Checks find what is wrong, times become shares of the ceilings of their own run, and both are kept for people."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from membound.kernels.bench import pointwise_cases, record  # noqa: E402
from membound.kernels.bench.benchmark import Ceilings, Failed, Timed, bench  # noqa: E402
from membound.kernels.bench.check import CASES, check  # noqa: E402
from membound.kernels.bench.trial import Case, Comparison, Inputs, Trial, exact, poisoned  # noqa: E402
from membound.kernels.triton import production  # noqa: E402
from membound.kernels.triton.launch import recording  # noqa: E402
from membound.kernels.triton.machine import REFERENCE_MACHINES  # noqa: E402

SMALL = [case for case in CASES if case.small]
ONE_OF_EACH = list({case.kernel: case for case in SMALL}.values())
MIB = 2**20


def silent(fraction, text):
    pass


def test_every_kernel_of_serving_has_small_cases_and_large_ones():
    served = {case.split()[0] for case in production.CASES}
    assert served <= {case.kernel for case in SMALL}
    assert served <= {case.kernel for case in CASES if not case.small}


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.kernel)
def test_every_kernel_is_right_on_fresh_inputs(case, device):
    for seed in (1, 2):
        (found,) = check([case], device, seed, silent)
        assert found.right, found


# How many experts are read depends on the data, which these tensors have not.
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if not case.small and case.kernel not in ("moe_linear", "block_copy")],
    ids=lambda case: f"{case.kernel} {case.name}",
)
def test_the_large_cases_launch_their_kernels_with_arguments_that_pass_their_checks(case):
    with FakeTensorMode(), recording(REFERENCE_MACHINES["sm90"]) as recorded:
        trial = case.make(Inputs(torch.device("cpu"), 1))
        trial.run()
    assert recorded.launches and trial.nbytes > 0


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (lambda y: y.mul_(1.02), None),
        (lambda y: y[-1:].copy_(y[:1]), None),
        (lambda y: y.flatten()[-1:].fill_(torch.nan), None),
        (lambda y: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_kernel_that_is_off_is_found(wrong, problem, device, monkeypatch):
    right = pointwise_cases.silu_mul

    def broken(*arguments, **options):
        y = right(*arguments, **options)
        wrong(y)
        return y

    monkeypatch.setattr(pointwise_cases, "silu_mul", broken)
    case = next(case for case in SMALL if case.kernel == "silu_mul")
    (found,) = check([case], device, 1, silent)
    assert not found.right and found.problem == problem


def test_what_a_kernel_leaves_unwritten_is_found(device, monkeypatch):
    def unwritten(gate_up):
        return torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)

    monkeypatch.setattr(pointwise_cases, "silu_mul", unwritten)
    (found,) = check([next(case for case in SMALL if case.kernel == "silu_mul")], device, 1, silent)
    assert found.of_tolerance == math.inf


def test_poison_ends_with_its_block():
    before = torch.empty
    with pytest.raises(RuntimeError, match="inside"), poisoned():
        assert torch.empty(3).isnan().all() and torch.empty_like(torch.zeros(2, dtype=torch.int8)).eq(-128).all()
        raise RuntimeError("inside")
    assert torch.empty is before


@given(
    values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=9),
    shift=st.floats(-1.0, 1.0, width=32),
    rtol=st.sampled_from([0.0, 0.01]),
    atol=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_a_tolerance_is_kept_exactly_where_numbers_are_close(values, shift, rtol, atol):
    reference = torch.tensor(values, dtype=torch.float64)
    result = reference + shift
    used = Comparison(result, reference, rtol, atol).used()
    close = bool(((result - reference).abs() <= atol + rtol * reference.abs()).all())
    assert (used <= 1.0) == close


def test_nan_another_shape_and_a_missing_number_are_never_close():
    one = torch.ones(3)
    assert exact(one, one).used() == exact(one, one).error() == 0.0
    for other in (torch.tensor([1.0, torch.nan, 1.0]), torch.ones(2), torch.ones(3, 1)):
        assert Comparison(other, one, 1.0, 1.0).used() == math.inf


def trial_of(nbytes, flops=0, **more):
    return Trial(lambda: None, lambda result: [], nbytes, flops, **more)


def missing():
    raise ImportError("no such library")


def broken():
    raise RuntimeError("CUDA error: invalid argument\nand a long story")


def test_times_are_medians_of_rows_whose_inputs_exceed_the_cache():
    rows = []

    def timer(runs):
        rows.append(len(runs))
        return [2e-3, 1e-3, 3e-3]

    peers = {"other": lambda: lambda: None, "absent": missing, "failing": broken}
    made = []

    def make(inputs):
        made.append(inputs)
        return trial_of(20 * MIB, 10**9, peers=peers)

    cases = [
        Case("a", "streams", make),
        Case("b", "tiny", lambda inputs: trial_of(1)),
        Case("c", "fails", lambda i: 1 / 0),
    ]
    streams, tiny, failed = bench(cases, torch.device("cpu"), 1, timer, 50 * MIB, silent)
    assert streams.inputs == len(made) == rows[0] == 8  # 160 MiB: three times the cache
    assert streams.seconds == 2e-3 and not streams.cached
    assert streams.peers == {
        "other": 2e-3,
        "absent": "not installed",
        "failing": "RuntimeError: CUDA error: invalid argument",
    }
    assert tiny.cached
    assert failed == Failed("c", "fails", "ZeroDivisionError: division by zero")


def test_shares_are_of_the_ceilings_of_the_same_precision():
    timed = Timed("k", "c", 1e-3, 0.0, 10**9, 4 * 10**11, "fp8", 1, False, {})
    ceilings = Ceilings(2e12, {"bf16": 4e14, "fp8": 8e14})
    assert timed.of_copy(ceilings) == pytest.approx(0.5)
    assert timed.of_matmul(ceilings) == pytest.approx(0.5)
    assert replace(timed, math="bf16").of_matmul(ceilings) == pytest.approx(1.0)
    assert replace(timed, math="bf16").of_roof(ceilings) == pytest.approx(1.0)
    assert replace(timed, math="int8").of_matmul(ceilings) is None
    assert replace(timed, math="int8").of_roof(ceilings) == pytest.approx(0.5)


def test_a_record_is_a_json_document_and_a_table_with_its_conditions(tmp_path):
    document = {"title": "Kernels", "conditions": {"clocks": {"SM": 1980}}, "rows": [{"error": math.inf}]}
    paths = record.write(tmp_path / "new", "kernels-x", document, [{"kernel": "a|b", "time": "1 ms"}])
    assert (
        [path.name for path in paths]
        == ["kernels-x.json", "kernels-x.md"]
        == sorted(path.name for path in (tmp_path / "new").iterdir())
    )
    assert json.loads(paths[0].read_text("utf-8"))["rows"] == [{"error": None}]
    lines = paths[1].read_text("utf-8").splitlines()
    assert lines == ["# Kernels", "", "* clocks: SM 1980", "", "| kernel | time |", "| --- | --- |", "| a\\|b | 1 ms |"]
    assert record.slug("NVIDIA H200") == "nvidia-h200"
