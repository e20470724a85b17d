"""Can a person measure their own server from Live: its fields, what may be sent to it, the job, and what comes out?"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pages import open_page, words_of

from membound.app import jobs, served, tasks
from membound.app.i18n import Translate
from membound.app.store import Store
from membound.app.views import devices, machine_choice, session
from membound.app.worker import JobCancelled, JobContext
from membound.roofline.errors import MemboundError
from membound.roofline.reading.plain_yaml import parse_yaml

T = Translate("en")
FAKE = Path(__file__).parents[1] / "runtime" / "endpoint" / "conftest.py"
SCENARIO = """name: asked
model: SmolLM2-135M
hardware: H100-SXM5
workload:
  arrivals: {kind: closed_loop, concurrency: 2}
  requests: 6
  prompts: {kind: synthetic, tokens: {kind: fixed, tokens: 8}}
  output_tokens: {kind: fixed, tokens: 4}
repeats: 2
"""


@pytest.fixture(scope="module")
def fake() -> Any:
    """The fake server of the endpoint's own tests."""
    spec = importlib.util.spec_from_file_location("fake_endpoint", FAKE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store that starts no worker."""
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path))
    monkeypatch.setattr(jobs, "submit", lambda store, kind, spec, owner="": store.submit_job(kind, spec, owner))
    monkeypatch.setattr(machine_choice, "has_torch", lambda: True)
    monkeypatch.setattr(session, "has_torch", lambda: True)
    monkeypatch.setattr(devices, "GPU_FILES", ())
    return Store(tmp_path)


def _ran(store: Store, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    """What a job's task returns; its job is done then."""
    task: Callable[..., Any] = {"compare": tasks.run_compare, "measure": tasks.run_measure}[kind]
    job_id = store.submit_job(kind, spec)
    store.start_job(job_id)
    context = JobContext(store, job_id)
    result = task(spec, context)
    context.flush()
    store.finish_job(job_id, "done", result=result)
    return {"job": job_id, **result}


def test_a_comparison_at_a_server_is_kept_and_shown_predicted_beside_measured(store: Store, fake: Any) -> None:
    with fake.serving(lambda exchange: fake.well(exchange, gap_s=0.002)) as server:
        done = _ran(store, "compare", {"scenario": SCENARIO, "endpoint": {"url": server.url}})
    assert {row["metric"] for row in done["metrics"]} >= {"tpot_s", "ttft_s", "e2e_s"}
    assert store.run(done["run_id"]).kind == "compare"
    for query in ({"job": done["job"]}, {"run": done["run_id"]}, {"job": done["job"], "lang": "zh"}):
        at = open_page("live", **query)
        assert not at.exception and not at.error
        table = at.dataframe[0].value
        assert len(table) == len(done["metrics"])
        assert list(table.iloc[:, 3].str.contains("–")) == [True] * len(table), "each prediction has its interval"


def test_a_run_at_a_server_tells_how_it_goes_on(store: Store, fake: Any) -> None:
    scenario = SCENARIO.replace("requests: 6", "requests: 24").replace("tokens: 4", "tokens: 20")
    with fake.serving(lambda exchange: fake.well(exchange, gap_s=0.005)) as server:
        done = _ran(store, "measure", {"scenario": scenario, "endpoint": {"url": server.url, "model": "fake"}})
    events = store.events(done["job"])
    assert any(event.kind == "live" and event.payload["tokens_per_s"] > 0 for event in events)
    assert any(event.kind == "text" and "word" in event.payload["text"] for event in events)
    assert done["provenance"]["endpoint"]["url"].startswith(server.url)


def test_a_cancelled_job_ends_its_run_at_the_server(store: Store, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobContext, "cancelled", lambda self: True)
    with fake.serving() as server, pytest.raises(JobCancelled):
        _ran(store, "measure", {"scenario": SCENARIO, "endpoint": {"url": server.url}})


def test_a_server_that_answers_nothing_is_one_sentence(store: Store) -> None:
    with pytest.raises(MemboundError, match=r"127\.0\.0\.1:9") as refused:
        _ran(store, "compare", {"scenario": SCENARIO, "endpoint": {"url": "http://127.0.0.1:9"}})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({}, "no address"),
        ({"url": "ftp://host"}, "server's address"),
        ({"url": "file:///etc/passwd"}, "server's address"),
        ({"url": "http://name:word@host"}, "name or a password"),
        ({"url": "http://host", "key_env": "AWS_SECRET_ACCESS_KEY"}, "MEMBOUND_KEY"),
        ({"url": "http://host", "key_env": "PATH"}, "MEMBOUND_KEY"),
        ({"url": "http://host", "key_env": "MEMBOUND_KEY_UNSET"}, "not set"),
        ({"url": "http://host" + "x" * 400}, "url"),
    ],
)
def test_what_may_not_be_sent_or_asked_is_refused_in_the_pages_words(
    asked: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(MemboundError, match=named) as refused:
        served.endpoint_of(asked)
    assert "--" not in str(refused.value) and "secret" not in str(refused.value)


def test_the_key_of_a_variable_set_for_it_is_sent_and_kept_nowhere(
    store: Store, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMBOUND_KEY_TEST", "sesame-4711")
    with fake.serving() as server:
        done = _ran(
            store, "measure", {"scenario": SCENARIO, "endpoint": {"url": server.url, "key_env": "MEMBOUND_KEY_TEST"}}
        )
        assert {headers["authorization"] for _, headers, _ in server.asked} == {"Bearer sesame-4711"}
    kept = [path.read_bytes() for path in store.home.rglob("*") if path.is_file()]
    assert done["run_id"] and not any(b"sesame-4711" in content for content in kept)


def test_live_asks_a_server_with_what_its_fields_hold(store: Store) -> None:
    at = open_page("live", scenario="plan-70b", kind="compare", machine="endpoint")
    assert T("live.endpoint_empty") in words_of(at) and at.button(key="run").disabled
    at.text_input(key="endpoint").set_value("http://127.0.0.1:8000").run()
    at.text_input(key="served").set_value("llama").run()
    assert at.query_params["endpoint"] in (["http://127.0.0.1:8000"], "http://127.0.0.1:8000")
    at.selectbox(key="taken").set_value("H200-SXM").run()
    at.button(key="run").click().run()
    (job,) = store.jobs()
    assert job.kind == "compare"
    assert job.spec["endpoint"] == {"url": "http://127.0.0.1:8000", "model": "llama"}
    assert parse_yaml(job.spec["scenario"], "a test")["hardware"] == "H200-SXM"


def test_a_link_names_a_server_and_never_a_key(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMBOUND_KEY_TEST", "x")
    at = open_page(
        "live", scenario="plan-70b", machine="endpoint", endpoint="http://127.0.0.1:8000", key_env="MEMBOUND_KEY_TEST"
    )
    assert at.text_input(key="endpoint").value == "http://127.0.0.1:8000"
    assert not at.text_input(key="key_env").value
    at.text_input(key="key_env").set_value("MEMBOUND_KEY_TEST").run()
    assert not at.button(key="run").disabled
    at.text_input(key="key_env").set_value("HOME").run()
    assert at.button(key="run").disabled and "MEMBOUND" in at.error[0].value


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_gpu_can_be_calibrated_from_the_page_and_chosen(
    store: Store, monkeypatch: pytest.MonkeyPatch, language: str, tmp_path: Path
) -> None:
    assert "gpu" not in open_page("live", lang=language).segmented_control(key="machine").options
    driver = tmp_path / "nvidia0"
    driver.touch()
    monkeypatch.setattr(devices, "GPU_FILES", (driver,))
    at = open_page("live", lang=language, machine="gpu")
    t = Translate(language)
    assert at.button(key="run").disabled
    assert at.button(key="calibrate").label == t("live.calibrate", machine=t("live.machine_gpu"))
    at.button(key="calibrate").click().run()
    (job,) = store.jobs()
    assert (job.kind, job.spec) == ("calibrate", {"device": "cuda"})


def test_a_scenario_for_another_device_is_not_started_here(store: Store) -> None:
    at = open_page("live", scenario="plan-70b", kind="measure")
    assert at.button(key="run").disabled
    assert T("live.for_other", hardware="#").partition("#")[0] in words_of(at)
