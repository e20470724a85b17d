"""A timeline shows what the result says, in files that trace viewers and tables read."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from membound.app.commands.root import app
from membound.roofline.errors import MemboundError
from membound.roofline.results.result import BOUNDS, RunResult
from membound.roofline.scenario import Scenario, parse_scenario
from membound.simulator.run import run
from membound.simulator.timeline import PHASES, PhaseLog, Timeline, checked_window

NANOSECOND_US = 1e-3


def scenario(requests: int = 150, **engine) -> Scenario:
    """A burst beyond what the KV blocks hold, so that some are preempted."""
    return parse_scenario(
        {
            "name": "timeline",
            "model": "Llama-3.1-8B",
            "hardware": "H100-SXM5",
            "engine": {"max_num_seqs": 48, "max_batched_tokens": 1024, "batching": "chunked_prefill"} | engine,
            "workload": {
                "arrivals": {"kind": "poisson", "rate_rps": 40.0},
                "requests": requests,
                "prompts": {"kind": "synthetic", "tokens": {"kind": "uniform", "low": 30, "high": 600}},
                "output_tokens": {"kind": "uniform", "low": 2, "high": 300},
                "seed": 3,
            },
        }
    )


def logged(chosen: Scenario, **how) -> tuple[RunResult, PhaseLog]:
    log = PhaseLog()
    return run(chosen, observer=log, **how), log


@pytest.fixture(scope="module", params=["recompute", "swap", "pools"])
def timed(request) -> tuple[RunResult, Timeline]:
    engines = {
        "recompute": {"num_blocks": 700},
        "swap": {"num_blocks": 700, "preemption": "swap", "host_kv_gib": 8.0},
        "pools": {"disaggregation": {"prefill_engines": 1, "decode_engines": 2}},
    }
    result, log = logged(scenario(**engines[request.param]))
    assert (result.summary.preemptions > 0) == (request.param != "pools")
    return result, Timeline.of(result, log)


def test_the_phases_of_a_request_are_its_whole_time_without_gaps(timed):
    result, timeline = timed
    phases = defaultdict(list)
    for one in timeline.phases:
        phases[one.request].append(one)
    table = result.requests
    for id, arrival_s, admitted_s, finished_s in zip(
        table["id"], table["arrival_s"], table["admitted_s"], table["finished_s"], strict=True
    ):
        of = phases[id]
        ends = [one.start_s + one.duration_s for one in of]
        assert of[0].start_s == arrival_s and ends[-1] == pytest.approx(finished_s)
        np.testing.assert_allclose(ends[:-1], [one.start_s for one in of[1:]])
        assert sum(one.duration_s for one in of if one.phase == "queued") == pytest.approx(admitted_s - arrival_s)
        assert all(before.phase != after.phase for before, after in itertools.pairwise(of))
    assert {one.phase for one in timeline.phases} <= set(PHASES)


def test_every_preemption_is_a_phase_and_swap_does_not_prefill_again(timed):
    result, timeline = timed
    names = [one.phase for one in timeline.phases]
    assert names.count("preempted") == result.summary.preemptions
    again = names.count("prefill") - result.summary.completed
    if result.scenario.engine.preemption != "swap":
        assert again == result.summary.preemptions
        return
    # Only a prompt that was not computed to its end is begun again.
    assert again < result.summary.preemptions / 4


def test_counters_are_the_requests_under_way(timed):
    """Little's law holds exactly: the time integral of a counter is the sum of the phases that it counts."""
    result, timeline = timed
    widths = np.diff(timeline.moments_s)
    for counter, counted in (("running", ("prefill", "decode")), ("waiting", ("queued", "preempted"))):
        held_s = float((timeline.counters[counter][:-1] * widths).sum())
        assert held_s == pytest.approx(sum(one.duration_s for one in timeline.phases if one.phase in counted), rel=1e-6)
        assert timeline.counters[counter][-1] == 0
    assert timeline.counters["kv_blocks"].max() <= result.steps["blocks_used"].max() * (
        1 + timeline.steps["lane"].max()
    )
    spent = float((result.steps["blocks_used"] * result.steps["time_s"]).sum())
    assert float((timeline.counters["kv_blocks"][:-1] * widths).sum()) == pytest.approx(spent, rel=1e-6)


def test_a_step_is_named_by_its_largest_share(timed):
    _, timeline = timed
    for index, bound in enumerate(timeline.bounds()):
        assert timeline.steps[bound][index] == max(timeline.steps[name][index] for name in BOUNDS)


def test_the_trace_is_one_that_viewers_open(timed, tmp_path: Path):
    """Chrome's trace event format: what each event must have, in order of time, and no slices that cross in a row."""
    result, timeline = timed
    path = tmp_path / "trace.json"
    timeline.write(path)
    document = json.loads(path.read_text("utf-8"))
    events = document["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    timed_events = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed_events] == sorted(event["ts"] for event in timed_events)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    titles = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert titles == {1: "timeline: engine", 2: "timeline: requests"}
    rows = defaultdict(list)
    for event in timed_events:
        assert event["pid"] in titles and event["ts"] >= 0
        if event["ph"] == "C":
            assert list(event["args"]) == [event["name"]]
        else:
            assert event["dur"] > 0 and (event["pid"], event["tid"]) in named
            rows[event["pid"], event["tid"]].append(event)
    for row in rows.values():
        for before, after in itertools.pairwise(row):
            assert before["ts"] + before["dur"] <= after["ts"] + NANOSECOND_US
    shown = [event for event in timed_events if event.get("cat") == "step"]
    assert sum(event["args"]["steps"] for event in shown) == result.steps["steps"].sum()
    assert sum(event["dur"] for event in shown) == pytest.approx(1e6 * result.steps["time_s"].sum())


def test_a_run_of_equal_steps_is_one_slice_that_says_how_many(tmp_path: Path):
    macro, log = logged(scenario())
    single, _ = logged(scenario(), step_by_step=True)
    few, many = (Timeline.of(result, log) for result in (macro, single))
    assert len(few.steps["start_s"]) < len(many.steps["start_s"])
    assert few.steps["steps"].sum() == many.steps["steps"].sum()
    document = json.loads(few.to_chrome())
    names = [event["name"] for event in document["traceEvents"] if event.get("cat") == "step"]
    counts = few.steps["steps"].astype(int)
    assert all([*name.split(" x "), "1"][1] == str(count) for name, count in zip(names, counts, strict=True))


def test_tables_have_every_row_in_both_formats(timed, tmp_path: Path):
    _, timeline = timed
    for name in ("t.csv", "t.parquet"):
        timeline.write(tmp_path / name)
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    table = parquet.read_table(tmp_path / "t.parquet")
    kinds = [row["kind"] for row in rows]
    assert kinds == table["kind"].to_pylist()
    assert kinds.count("step") == len(timeline.steps["start_s"]) and kinds.count("phase") == len(timeline.phases)
    assert [row["request"] for row in rows if row["kind"] == "step"] == [""] * kinds.count("step")
    waits = [row for row in rows if row["name"] == "queued"]
    assert sum(float(row["duration_s"]) for row in waits) == pytest.approx(
        sum(one.duration_s for one in timeline.phases if one.phase == "queued")
    )


def test_a_long_run_is_cut_and_says_so():
    result, log = logged(scenario())
    whole = Timeline.of(result, log)
    assert not whole.notes
    cut = Timeline.of(result, log, most=100)
    assert 0 < len(cut.phases) + len(cut.steps["start_s"]) <= 100
    assert "--from and --to" in cut.notes[0] and "100 slices" in cut.notes[0]
    part = Timeline.of(result, log, from_s=1.0, to_s=2.0)
    starts = np.concatenate([part.steps["start_s"], [one.start_s for one in part.phases], part.moments_s])
    assert len(starts) and np.all((starts >= 1.0) & (starts < 2.0))
    assert "begin from 1 s to 2 s" in part.notes[0]


def test_what_the_result_does_not_say_is_not_made_up():
    result, _ = logged(scenario(num_blocks=700))
    timeline = Timeline.of(result)
    assert not any(one.phase == "preempted" for one in timeline.phases)
    assert f"{result.summary.preemptions} preemptions are not shown" in timeline.notes[0]


@pytest.mark.parametrize("window", [(-1.0, 2.0), (2.0, 2.0), (1e6, None)])
def test_a_window_without_anything_is_refused(window):
    result, log = logged(scenario(5))
    with pytest.raises(MemboundError, match="--from"):
        Timeline.of(result, log, *window)


def test_the_command_writes_it_and_refuses_what_has_no_effect(tmp_path: Path):
    file, out = tmp_path / "s.yaml", tmp_path / "trace.json"
    file.write_text(scenario(20).to_yaml())
    done = CliRunner().invoke(app, ["simulate", str(file), "--timeline", str(out), "--to", "0.5", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["summary"]["completed"] == 20
    assert "those that begin from 0 s to 0.5 s" in done.stderr and str(out) in done.stderr
    assert json.loads(out.read_text())["otherData"]["notes"]
    for arguments, said in ((["--to", "1"], "give --timeline"), (["--timeline", "x.txt"], "ends in .json")):
        refused = CliRunner().invoke(app, ["simulate", str(file), *arguments])
        assert isinstance(refused.exception, MemboundError) and said in str(refused.exception)


@pytest.mark.parametrize(
    ("from_s", "to_s"), [(math.nan, None), (None, math.nan), (-1.0, None), (2.0, 1.0), (math.inf, None)]
)
def test_a_window_that_is_none_is_refused_without_a_run(from_s, to_s):
    with pytest.raises(MemboundError, match=r"--from|--to"):
        checked_window(from_s, to_s)
    assert checked_window(1.0, None) == (1.0, math.inf)
