"""Is a point of a sweep what a single run would be, whoever computes it, and do bad points leave the others alone?"""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.scenario import Scenario, parse_scenario
from membound.simulator.run import run
from membound.simulator.sweeping.axes import at
from membound.simulator.sweeping.sweep import flat, grid, parse_axis, predicted, sweep, to_json
from membound.simulator.workers import Workers


def scenario(**changes: Any) -> Scenario:
    document = {
        "name": "swept",
        "model": "Llama-3.1-8B",
        "hardware": "H100-SXM5",
        "techniques": [{"name": "continuous_batching"}],
        "workload": {
            "arrivals": {"kind": "closed_loop", "concurrency": 2},
            "requests": 8,
            "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 64}},
            "output_tokens": {"kind": "fixed", "tokens": 16},
        },
    }
    return parse_scenario(document | changes)


AXES = [("workload.arrivals.concurrency", [1, 4]), ("hardware", ["H100-SXM5", "L4"])]


@pytest.mark.parametrize("workers", [Workers("sequential"), Workers("loky", 2), Workers("threading", 2)])
def test_each_point_equals_its_single_run(workers):
    points = sweep(scenario(), AXES, workers=workers)
    assert [point.values for point in points] == grid(AXES)
    for point in points:
        alone = scenario()
        for path, value in point.values.items():
            alone = alone.with_value(path, value)
        assert point.summary == run(alone).summary.model_dump(mode="json") and point.reason is None


def test_a_point_that_fails_keeps_its_reason_and_the_others_go_on():
    axes = [("model", ["Llama-3.1-8B", "Llama-3.1-70B"]), ("parallel.tp", [1, 3])]
    points = sweep(scenario(), axes, workers=Workers("sequential"))
    assert [point.reason is None for point in points] == [True, False, False, False]
    assert "does not fit" in points[2].reason and "tp is 3" in points[1].reason


@pytest.mark.parametrize(
    ("path", "values", "said"),
    [
        ("workload.requests", [2, -1], "'workload.requests' is -1"),
        ("workload.arrivals.concurrency", [1, "foo"], "'foo': give a whole number"),
        ("model", ["Llama-3.1-8B", "Lama"], "did you mean Llama"),
        ("hardware", ["nothing"], "hardware 'nothing' is unknown"),
        ("batch", [0], "batch is '0'; give a whole number"),
        ("context", [1.5], "context is '1.5'; give a whole number"),
    ],
)
def test_a_value_that_no_point_can_have_is_a_mistake(path, values, said):
    with pytest.raises(MemboundError, match=re.escape(said)):
        sweep(scenario(), [(path, values)], workers=Workers("sequential"))


def test_a_value_may_need_another_axis():
    axes = [("parallel.ep", [2]), ("parallel.tp", [2, 4]), ("model", ["Mixtral-8x7B"])]
    points = sweep(scenario(), axes, simulate=False, workers=Workers("sequential"))
    assert all(point.reason is None for point in points)


def test_a_batch_and_a_context_are_those_of_a_decode_step():
    asked = scenario(engine={"max_num_seqs": 4})
    (point,) = sweep(asked, [("batch", [32]), ("context", [1000])], simulate=False, workers=Workers("sequential"))
    assert point.summary["batch"] == pytest.approx(32)
    there = at(asked, point.values)
    prompt, output = there.workload.prompts.tokens.tokens, there.workload.output_tokens.tokens
    assert prompt + (output + 1) / 2 == pytest.approx(1000, abs=1) and output == 16


@pytest.mark.parametrize(
    ("name", "workload", "fields"),
    [
        ("batch", {"arrivals": {"kind": "poisson", "rate_rps": 1.0}}, ("workload.arrivals.rate_rps", "concurrency")),
        (
            "context",
            {"output_tokens": {"kind": "uniform", "low": 1, "high": 9}},
            ("workload.prompts.tokens", "workload.output_tokens"),
        ),
    ],
)
def test_where_a_short_name_says_nothing_the_fields_are_named(name, workload, fields):
    asked = scenario()
    for field, value in workload.items():
        asked = asked.with_value(f"workload.{field}", value)
    with pytest.raises(MemboundError) as caught:
        sweep(asked, [(name, [8])], workers=Workers("sequential"))
    assert all(field in str(caught.value) for field in fields)


def test_a_path_that_is_nowhere_is_a_mistake_of_all_points():
    with pytest.raises(MemboundError, match=r"'workload\.colour' is not in the scenario"):
        sweep(scenario(), [("workload.colour", [1])])


def test_one_axis_may_bring_what_another_changes():
    axes = [("workload.arrivals", [{"kind": "poisson", "rate_rps": 1.0}]), ("workload.arrivals.rate_rps", [2, 4])]
    points = sweep(scenario(), axes, workers=Workers("sequential"))
    assert all(point.reason is None for point in points)


def test_more_clients_give_more_tokens_a_second_by_closed_forms_too():
    points = sweep(scenario(), AXES[:1], simulate=False, workers=Workers("sequential"))
    few, many = (point.summary for point in points)
    assert few["output_tokens_per_s"] < many["output_tokens_per_s"] and few["tpot_s"] < many["tpot_s"]
    assert many == predicted(scenario().with_value("workload.arrivals.concurrency", 4))


def test_closed_forms_are_near_a_steady_run():
    many = scenario().with_value("workload.requests", 64)
    closed, exact = predicted(many), run(many).summary
    assert closed["tpot_s"] == pytest.approx(exact.tpot_s.mean, rel=0.1)
    assert closed["output_tokens_per_s"] == pytest.approx(exact.output_tokens_per_s, rel=0.1)


def test_littles_law_finds_the_concurrency_of_an_open_workload():
    rate = 20.0
    opened = scenario().with_value("workload.arrivals", {"kind": "poisson", "rate_rps": rate})
    closed = predicted(opened)
    assert closed["requests_per_s"] == pytest.approx(rate, rel=0.05)
    in_system = closed["requests_per_s"] * (closed["ttft_s"] + 15 * closed["tpot_s"])
    assert closed["concurrency"] == pytest.approx(in_system, rel=0.1)


def test_progress_comes_to_its_end():
    told: list[float] = []
    sweep(scenario(), AXES, workers=Workers("sequential"), progress=lambda fraction, message: told.append(fraction))
    assert told == [0.25, 0.5, 0.75, 1.0]


def test_who_stops_a_sweep_has_the_points_until_then():
    def stop(share: float, said: str) -> None:
        if said == "2 of 3":
            raise KeyboardInterrupt

    axes, found = [("workload.arrivals.concurrency", [1, 2, 3])], []
    with pytest.raises(KeyboardInterrupt):
        sweep(scenario(), axes, simulate=False, workers=Workers("sequential"), progress=stop, found=found)
    assert found == sweep(scenario(), axes, simulate=False, workers=Workers("sequential"))[:2]


def test_axes_are_read_as_yaml():
    assert parse_axis("a.b=1,2.5,x") == ("a.b", [1, 2.5, "x"])
    assert parse_axis("t=[],[{name: eagle}]") == ("t", [[], [{"name": "eagle"}]])
    assert grid([("a", [1, 2]), ("b", [3, 4])]) == [{"a": i, "b": j} for i in (1, 2) for j in (3, 4)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a", "give KEY=A,B,C"),
        ("a=", "give KEY=A,B,C"),
        ("=1", "give KEY=A,B,C"),
        ("a=[", "YAML"),
        ("batch=1,8,1", "gives 1 twice"),
    ],
)
def test_bad_axes_are_one_sentence(text, said):
    with pytest.raises(MemboundError, match=said):
        parse_axis(text)


def test_an_axis_is_given_once_and_sweeps_end():
    with pytest.raises(MemboundError, match="twice"):
        grid([("a", [1]), ("a", [2])])
    with pytest.raises(MemboundError, match="at most"):
        grid([(name, range(1000)) for name in "abc"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"backend": "slurm"}, "backend is 'slurm'"),
        ({"jobs": 0}, "jobs is 0"),
        ({"address": "here:1"}, "is for backend ray or dask"),
    ],
)
def test_workers_that_cannot_be_are_one_sentence(arguments, said):
    with pytest.raises(MemboundError, match=said):
        Workers(**arguments)


@pytest.mark.parametrize("backend", ["ray", "dask"])
def test_a_cluster_that_is_not_installed_says_what_to_install(backend):
    if importlib.util.find_spec(backend) is not None:
        pytest.skip(f"{backend} is installed")
    with pytest.raises(MemboundError, match="not installed; pip install"):
        sweep(scenario(), AXES, workers=Workers(backend))


def test_the_document_has_every_point_and_flat_columns():
    points = sweep(scenario(), AXES, workers=Workers("sequential"))
    document = to_json(scenario(), points, simulate=True)
    assert document["by"] == "simulation" and len(document["points"]) == 4
    columns = flat(document["points"][0]["summary"])
    assert {"ttft_s.p99", "bottleneck_share.compute", "output_tokens_per_s"} <= set(columns)


class _FakeRay(types.ModuleType):
    """What membound asks of Ray: tasks that are handed out, and results that are waited for."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.asked: list[str] = []

    def init(self, **options: Any) -> None:
        self.asked.append(f"init {sorted(options)}")

    def remote(self, function: Callable[[Any], Any]) -> Any:
        return types.SimpleNamespace(remote=lambda item: (function, item))

    def get(self, task: tuple[Callable[[Any], Any], Any]) -> Any:
        self.asked.append("get")
        return task[0](task[1])

    def shutdown(self) -> None:
        self.asked.append("shutdown")


def test_ray_gives_results_in_their_order_as_they_come_and_is_left_at_the_end(monkeypatch):
    ray, seen = _FakeRay(), []
    monkeypatch.setitem(sys.modules, "ray", ray)
    found = Workers("ray", jobs=3).map(abs, [-1, -2, -3], lambda share, said: seen.append((share, len(ray.asked))))
    assert found == [1, 2, 3] and ray.asked == ["init ['log_to_driver', 'num_cpus']", *["get"] * 3, "shutdown"]
    assert [asked for _, asked in seen] == [2, 3, 4], "progress is told when a result is there"


@pytest.mark.parametrize("backend", ["ray", "dask"])
@pytest.mark.parametrize("address", ["127.0.0.1:9", "tcp://127.0.0.1:9", "127.0.0.1:99999"])
def test_a_cluster_that_does_not_answer_is_one_sentence(backend, address):
    with pytest.raises(MemboundError, match=r"option --address is .*, where no cluster answers") as caught:
        Workers(backend, address=address).map(abs, [-1])
    assert "\n" not in str(caught.value)


def test_tokens_cost_what_the_devices_do_in_their_time():
    asked = scenario(parallel={"tp": 2})
    told = predicted(asked)
    usd_per_s = told["cost_usd_per_million_tokens"] * told["output_tokens_per_s"] / 1e6
    assert usd_per_s == pytest.approx(2 * get_hardware("H100-SXM5").price_usd_per_h / 3600)
    assert predicted(scenario(hardware="H20"))["cost_usd_per_million_tokens"] is None


def test_static_batches_that_nobody_asked_for_are_noted_wherever_they_are_swept() -> None:
    def notes(axes: list[tuple[str, list[Any]]], **changes: Any) -> list[str]:
        asked = scenario(engine={"profile": "vllm"}, **changes)
        found: list[str] = to_json(asked, sweep(asked, axes, simulate=False), simulate=False)["notes"]
        return found

    users = [("workload.arrivals.concurrency", [1, 4])]
    batching = ("engine.batching", ["static", "continuous"])
    assert notes(users) == [] and notes([*users, batching], techniques=[]) == []
    (said,) = notes(users, techniques=[])
    assert said.startswith("batches are static")
