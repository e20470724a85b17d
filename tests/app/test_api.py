"""Does a program get from `membound.app.api` what the commands print?"""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from membound.app import api
from membound.app.api import MemboundError

ASKED = api.scenario("plan-70b", {"workload.requests": 40, "workload.arrivals.rate_rps": 2.0})

TOO_LONG = {"engine.batching": "continuous", "engine.max_batched_tokens": 64}


def test_all_that_is_public_is_named_and_says_what_it_does() -> None:
    assert api.__all__ == sorted(api.__all__)
    for name in set(api.__all__) - {"Question"}:  # a union of types has no words of its own
        assert inspect.getdoc(getattr(api, name)), name
    own = {name for name, found in vars(api).items() if inspect.isfunction(found) and found.__module__ == api.__name__}
    assert {name for name in own if not name.startswith("_")} <= set(api.__all__)


def test_a_question_is_a_name_a_file_a_mapping_or_a_scenario(tmp_path: Path) -> None:
    path = tmp_path / "asked.yaml"
    path.write_text(ASKED.to_yaml(), "utf-8")
    mapping = ASKED.model_dump(mode="json")
    assert api.scenario(path) == api.scenario(str(path)) == api.scenario(mapping) == api.scenario(ASKED) == ASKED
    assert api.scenario("plan-70b").name == "plan-70b"


def test_a_step_is_that_of_the_scenario_s_load_where_nobody_says_which() -> None:
    usual = api.predict(ASKED)
    assert usual.batch > 1 and usual.context > 1
    same = api.predict(ASKED, batch=usual.batch, context=usual.context)
    assert (same.time_s, same.bottleneck) == (usual.time_s, usual.bottleneck)
    assert api.predict(ASKED, batch=7).batch == 7
    assert api.predict(ASKED, phase="prefill").batch == 1


def test_a_grid_of_steps_has_the_seconds_of_each() -> None:
    batches, contexts = [1, 8, 32], np.array([512, 4096])
    seconds = api.decode_seconds(ASKED, batches, contexts)
    assert seconds.shape == (3, 2)
    for row, batch in zip(seconds, batches, strict=True):
        for found, context in zip(row, contexts, strict=True):
            assert found == pytest.approx(api.predict(ASKED, batch=batch, context=int(context)).time_s)
    assert api.decode_seconds(ASKED, 8, 512).shape == (1, 1)


@pytest.mark.parametrize("batches", [[], [0], [[1, 2]], "many", [float("nan")]])
def test_a_batch_that_is_none_is_refused_with_its_name(batches: Any) -> None:
    with pytest.raises(MemboundError, match=r"^batches is .* give numbers from 1 on"):
        api.decode_seconds(ASKED, batches, [512])


def test_a_context_beyond_the_model_is_refused_as_in_one_step() -> None:
    with pytest.raises(MemboundError) as alone:
        api.predict(ASKED, batch=1, context=10_000_000)
    with pytest.raises(MemboundError) as many:
        api.decode_seconds(ASKED, [1], [512, 10_000_000])
    assert "more than the" in str(alone.value) and "more than the" in str(many.value)


def test_a_run_in_virtual_time_has_a_record_of_each_request_and_shows_its_steps() -> None:
    ends: list[float] = []
    result = api.simulate(ASKED, observer=lambda step, outcome, end_s: ends.append(end_s))
    assert result.summary.completed == len(result.requests["arrival_s"]) == 40
    assert ends == sorted(ends) and len(ends) > 0


def test_a_sweep_takes_arrays_and_gives_rows_of_a_table() -> None:
    axes = {"workload.arrivals.rate_rps": np.array([1.0, 2.0]), "parallel.tp": np.array([4, 8])}
    points = api.sweep(ASKED, axes, simulate=False, workers=api.Workers("sequential"))
    assert [tuple(point.values.values()) for point in points] == [(1.0, 4), (1.0, 8), (2.0, 4), (2.0, 8)]
    assert all({*axes, "tpot_s", "bottleneck_share.compute", "reason"} <= set(point.row) for point in points)


def test_what_may_be_several_may_be_one() -> None:
    alone = api.stack(ASKED, techniques="w8a8", batches=8)
    assert [one.together for one in alone] == [
        one.together for one in api.stack(ASKED, techniques=["w8a8"], batches=[8])
    ]
    (point,) = api.sweep(ASKED, {"parallel.tp": 8}, simulate=False, workers=api.Workers("sequential"))
    assert point.values == {"parallel.tp": 8}
    named = api.plan(ASKED, devices="H100-SXM5", precisions="given", confirm=0)
    assert named.best is not None and named.best.replica.hardware.name == "H100-SXM5"


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: api.scenario(3), "the scenario is 3; give a name"),
        (lambda: api.scenario(ASKED, {1: 1}), "values is {1: 1}; give a mapping of dotted paths"),
        (lambda: api.scenario(ASKED, [("hardware", "H20")]), "values is "),
        (lambda: api.stack(ASKED, techniques=[3]), "techniques has 3; give names as text"),
        (lambda: api.plan(ASKED, devices=[None]), "devices has None; give names"),
        (lambda: api.sweep(ASKED, {"parallel.tp": []}), r"over\['parallel.tp'\] has no values"),
    ],
)
def test_what_is_of_another_kind_is_refused_with_its_name(ask: Any, says: str) -> None:
    with pytest.raises(MemboundError, match=says):
        ask()


def test_techniques_stack_and_advice_and_plans_are_of_the_same_scenario() -> None:
    (stack,) = api.stack(ASKED, techniques=["weight_quantization:int4", "kv_quantization"], batches=[8])
    assert stack.together is not None and stack.product is not None and stack.together > 1.0
    advice = api.advise(ASKED, batch=8, context=2048)
    assert advice.scenario.name == "plan-70b" and advice.moves
    plan = api.plan(ASKED, devices=["H100-SXM5"], confirm=0)
    assert plan.best is not None and plan.simulated == 0


def test_answers_are_a_line_in_a_notebook_that_says_what_they_are() -> None:
    """The tables of a run, and the scenarios of a plan, are half a megabyte."""
    answers = {
        "batch 8, context 2048, on ": api.predict(ASKED, batch=8, context=2048),
        "40 of 40 requests served": api.simulate(ASKED),
        "0 of 40 requests served": api.simulate(api.scenario(ASKED, TOO_LONG)),
        "moves in ": api.advise(ASKED, batch=8, context=2048),
        "x H100-SXM5": api.plan(ASKED, devices=["H100-SXM5"], confirm=0),
    }
    for said, answer in answers.items():
        assert said in repr(answer) and len(repr(answer)) < 400 and "\n" not in repr(answer)
        assert repr(answer).startswith(f"<{type(answer).__name__}: ")


def test_another_device_is_not_measured_here() -> None:
    with pytest.raises(MemboundError, match="only 'local' and 'local-gpu' can be measured here"):
        api.measure(ASKED)


def test_predicting_imports_no_torch() -> None:
    code = "import sys; from membound.app import api; api.predict('plan-70b'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
