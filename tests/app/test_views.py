"""What do the pages show from an empty store to a finished comparison, and what in each state between?"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pages import open_page, words_of
from streamlit.testing.v1 import AppTest

from membound.app import jobs, text
from membound.app.i18n import LANGUAGES, Translate, sentences
from membound.app.store import Store
from membound.app.views import machine, session
from membound.roofline.hardware import catalog
from membound.roofline.hardware.calibration import Calibration
from membound.roofline.reading.plain_yaml import parse_yaml
from membound.roofline.scenario import load_scenario, scenario_of_text
from membound.roofline.scenario.workload import Arrivals

MAIN = Path(__file__).parents[2] / "app" / "main.py"
T = Translate("en")
LIVE_CPU = load_scenario("live-cpu").to_yaml()
ARRIVALS: list[dict[str, Any]] = [
    {"kind": "constant", "rate_rps": 2},
    {"kind": "gamma", "rate_rps": 2, "cv": 2},
    {"kind": "mmpp", "states": [{"rate_rps": 9, "dwell_s": 1}, {"rate_rps": 1, "dwell_s": 9}]},
    {"kind": "sine", "rate_rps": 2, "swing": 0.5},
    {"kind": "hourly", "rates_rps": [1, 2]},
]
VARIANT = {"name": "![x](//evil.example/p)", "techniques": ["int8_weights"]}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store that starts no worker."""
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path))

    def submit(store: Store, kind: str, spec: Mapping[str, Any], owner: str = "") -> str:
        return store.submit_job(kind, spec, owner)

    monkeypatch.setattr(jobs, "submit", submit)
    monkeypatch.setattr(session, "has_torch", lambda: True)
    monkeypatch.setattr(machine, "has_torch", lambda: True)
    return Store(tmp_path)


@pytest.fixture
def calibrated(store: Store) -> Store:
    (store.home / "calibration").mkdir()
    shutil.copy(Path(__file__).with_name("calibration.json"), store.home / "calibration" / "local.json")
    return store


def _row(technique: str, users: int, measured: float | None) -> dict[str, Any]:
    is_baseline = technique == "baseline"
    predicted = 0.02 if is_baseline else 1.8
    return {
        "technique": technique, "baseline": "baseline" if is_baseline else "bf16 weights", "metric": "tpot_s",
        "unit": "s" if is_baseline else "ratio", "point": {"workload.arrivals.concurrency": users},
        "predicted": predicted, "low": predicted * 0.9, "high": predicted * 1.1, "measured": measured,
        "spread": None if measured is None else 0.01, "error": None if measured is None else predicted / measured - 1,
        "verdict": "not measured" if measured is None or is_baseline else "gain", "lossless": is_baseline,
        "quality": None if is_baseline else {"kl_nats": 0.01, "top1_agreement": 0.97, "tokens": 500, "against": "bf16"},
        "bottleneck_before": "memory_weights", "bottleneck_after": "overhead", "samples": [], "conditions": "a test",
    }  # fmt: skip


def _finished_comparison(store: Store) -> str:
    rows = [_row("baseline", 1, 0.021), _row("int8_weights", 1, 1.7), _row("baseline", 4, 0.03)]
    job_id = store.submit_job("compare", {"scenario": LIVE_CPU})
    store.start_job(job_id)
    store.finish_job(job_id, "done", result={"run_id": "r", "comparisons": rows, "notes": ["a note"]})
    return job_id


def test_every_page_works_in_both_languages_from_an_empty_store(store: Store) -> None:
    for name in ("explore", "live", "start"):
        for language in ("en", "zh"):
            at = open_page(name, lang=language)
            assert not at.exception and not at.error
            assert at.title[0].value == Translate(language)(f"{name}.title")


def test_the_main_page_has_the_language_switch(store: Store) -> None:
    at = AppTest.from_file(str(MAIN), default_timeout=30).run()
    assert not at.exception
    at.segmented_control(key="lang").set_value("zh").run()
    assert at.title[0].value == Translate("zh")("start.title")
    assert at.query_params["lang"] == ["zh"] or at.query_params["lang"] == "zh"


def test_start_calibrates_by_itself_and_only_once(store: Store) -> None:
    for _ in range(2):
        at = open_page("start")
        assert T("calibrate.running") in words_of(at)
    (job,) = store.jobs()
    assert (job.kind, job.spec) == ("calibrate", {"quick": True})


def test_a_first_look_may_be_asked_for_before_the_roofs_are_measured(store: Store) -> None:
    at = open_page("start")
    at.button(key="measure").click().run()
    look, roofs = store.jobs()
    assert (roofs.kind, look.kind) == ("calibrate", "compare") and T("start.wait_for_roofs") not in words_of(at)
    scenario = scenario_of_text(look.spec["scenario"])
    whole = load_scenario("live-cpu")
    assert (scenario.model, scenario.techniques) == (whole.model, whole.techniques)
    ((point, _),) = scenario.points()
    assert scenario.repeats > 1 and point["workload.arrivals.concurrency"] == 4, "a spread at one named operating point"


def test_roofs_that_were_measured_quickly_say_so_and_offer_the_rest(calibrated: Store) -> None:
    assert T("calibrate.was_quick") not in words_of(open_page("start"))
    path = calibrated.home / "calibration" / "local.json"
    quick = Calibration.load(path)
    quick.model_copy(update={"notes": [sentences("en")["says.quickly"]]}).save(path)
    at = open_page("start")
    assert T("calibrate.was_quick") in words_of(at)
    at.button(key="calibrate_all").click().run()
    assert [(job.kind, job.spec) for job in calibrated.jobs()] == [("calibrate", {})]
    assert "calibrate_all" not in [button.key for button in at.button]


def test_live_says_that_a_calibration_runs_and_offers_no_second_one(store: Store) -> None:
    job_id = store.submit_job("calibrate", {})
    store.start_job(job_id)
    store.report(job_id, progress=(0.5, "linears"))
    at = open_page("live")
    assert T("live.calibrating", progress=text.percent(0.5)) in words_of(at)
    assert T("live.not_calibrated", machine=T("live.machine_cpu")) not in words_of(at)
    assert "calibrate" not in [button.key for button in at.button] and at.button(key="run").disabled


def test_a_busy_machine_is_named_while_it_is_calibrated(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.submit_job("calibrate", {})
    for load, is_said in ((100_000.0, True), (0.0, False)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load,) * 3)
        assert (f"{load:.1f}" in words_of(open_page("start"))) is is_said


@pytest.mark.parametrize("has_cpu", [False, True])
def test_live_refuses_to_simulate_a_device_that_was_not_measured(store: Store, has_cpu: bool) -> None:
    if has_cpu:
        (store.home / "calibration").mkdir()
        shutil.copy(Path(__file__).with_name("calibration.json"), store.home / "calibration" / "local.json")
    at = open_page("live", scenario="llama-8b-gpu", kind="simulate")
    key = "live.simulate_other" if has_cpu else "live.simulate_uncalibrated"
    assert T(key, hardware="local-gpu") in words_of(at) and at.button(key="run").disabled
    assert not open_page("live", scenario="plan-70b", kind="simulate").button(key="run").disabled


def test_live_announces_points_and_repeats_only_where_they_are_run(store: Store) -> None:
    said = {kind: words_of(open_page("live", scenario="plan-70b", kind=kind)) for kind in ("compare", "simulate")}
    cells = T("live.cells", points=4, repeats=load_scenario("plan-70b").repeats)
    assert cells in said["compare"] and "repeats" not in said["simulate"]


def test_a_refused_calibration_says_why_and_may_be_tried_again(store: Store) -> None:
    job_id = store.submit_job("calibrate", {})
    store.finish_job(job_id, "failed", error="two runs differ by 34 %, more than 20 %: close other programs")
    at = open_page("start")
    assert "two runs differ by 34 %" in at.error[0].value
    assert T("machine.stand_in", device=machine.STAND_IN) in words_of(at)
    at.button(key="calibrate_again").click().run()
    assert len(store.jobs("calibrate")) == 2


def test_start_without_torch_says_how_to_get_it_and_draws_a_device(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "has_torch", lambda: False)
    at = open_page("start")
    assert T("state.no_torch") in words_of(at) and at.code[0].value == "make setup TORCH=cpu"
    assert store.jobs() == []


def test_start_says_what_binds_this_machine(calibrated: Store) -> None:
    at = open_page("start")
    assert "Decode on this machine is bound by **reading weights**" in words_of(at)
    assert not at.button(key="measure").disabled
    assert any("GB/s" in metric.value for metric in at.metric)


def test_the_second_button_measures_the_whole_scenario(calibrated: Store) -> None:
    at = open_page("start")
    at.button(key="measure_whole").click().run()
    (job,) = calibrated.jobs()
    assert job.kind == "compare" and job.spec["scenario"] == LIVE_CPU
    assert at.button(key=f"cancel_{job.id}").label == T("job.cancel")


def test_a_finished_measurement_is_found_by_a_new_session(calibrated: Store) -> None:
    _finished_comparison(calibrated)
    at = AppTest.from_file(str(MAIN), default_timeout=30).run()
    assert not at.exception
    gains = next(frame.value for frame in at.dataframe if T("column.verdict") in frame.value)
    assert gains[T("column.measured")].tolist() == ["1.70× ± 0.01"]
    assert gains[T("column.error")].tolist() == ["+5.9 %"]
    assert gains[T("column.bottleneck")].tolist() == ["● reading weights → ◆ overhead (launches, host)"]
    assert "KL 0.010 nats" in gains[T("column.quality")][0]


def test_explore_answers_with_time_interval_and_bound(store: Store) -> None:
    at = open_page("explore")
    assert "reading weights" in at.header[0].value and " ms" in at.header[0].value
    assert "measured on H100-SXM5" in words_of(at)


def test_explore_names_what_binds_where_it_says_what_binds_next(store: Store) -> None:
    assert "Without reading weights, " in words_of(open_page("explore", hw="H100-SXM5", batch="1"))


def test_a_question_of_the_start_page_names_no_device_where_its_page_compares_several() -> None:
    for language in LANGUAGES:
        asked = sentences(language)["start.ask_plan"]
        assert not [name for name in catalog() if name.partition("-")[0] in asked]


def test_explore_says_plainly_that_a_device_was_not_measured(store: Store) -> None:
    at = open_page("explore", hw="Max-1550")
    assert "Max-1550 was not measured: its times are inherited from HBM devices" in words_of(at)


def test_explore_divides_a_model_as_far_as_its_heads_go(store: Store) -> None:
    at = open_page("explore", model="Qwen2.5-0.5B", tp="2")
    assert at.segmented_control(key="tp").options == ["1", "2"]
    at.toggle(key="roofline_table").set_value(True).run()
    (operators,) = (frame.value for frame in at.dataframe if T("column.operator") in frame.value)
    assert any(part.startswith(T("group.communication")) for part in operators[T("column.group")])


@pytest.mark.parametrize("model", ["DeepSeek-V3", "Jamba-v0.1", "RWKV-7-1.5B", "Llama-3.3-Nemotron-Super-49B"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_explore_draws_models_of_every_kind(store: Store, model: str, phase: str) -> None:
    at = open_page("explore", model=model, hw="B200-SXM", phase=phase, ctx="1024")
    assert not at.exception and at.header[0].value


def test_a_link_reproduces_the_operating_point(calibrated: Store) -> None:
    query = {
        "model": "SmolLM2-135M",
        "hw": "local",
        "batch": "4",
        "ctx": "512",
        "with": "int8_weights",
        "phase": "verify",
    }
    at = open_page("explore", **query, gamma="6")
    assert at.selectbox(key="model").value == "SmolLM2-135M"
    assert at.slider(key="gamma").value == 6
    assert "this machine come from its own calibration" in words_of(at)


def test_a_link_with_nonsense_falls_back_to_the_default(store: Store) -> None:
    at = open_page("explore", model="no-such", batch="-3", phase="sleep")
    assert not at.exception and at.selectbox(key="model").value == "Llama-3.1-8B"


def test_a_choice_is_written_to_the_url_and_a_default_leaves_no_trace(store: Store) -> None:
    at = open_page("explore", batch="64")
    at.selectbox(key="hw").set_value("A10G").run()
    assert at.query_params["hw"] in ("A10G", ["A10G"])
    at.selectbox(key="hw").set_value("H100-SXM5").run()
    assert "hw" not in at.query_params


def test_a_model_that_does_not_fit_says_so(store: Store) -> None:
    at = open_page("explore", model="Llama-3.1-70B", hw="A10G")
    assert "does not fit" in at.error[0].value and "22.5 GiB of A10G" in at.error[0].value


def test_explore_of_an_uncalibrated_machine_says_what_to_do(store: Store) -> None:
    at = open_page("explore", hw="local")
    assert not at.exception and "calibrat" in at.error[0].value


@pytest.mark.parametrize(
    ("yaml_text", "said"),
    [
        ("name: x\nnonsense: 1\n", "missing"),
        ("name: [1", "YAML"),
        ("just text", "mapping"),
    ],
)
def test_a_wrong_scenario_gives_one_sentence_and_cannot_be_run(calibrated: Store, yaml_text: str, said: str) -> None:
    at = open_page("live", scenario="own")
    at.text_area(key="draft_live").set_value(yaml_text).run()
    assert said in at.error[0].value and "\n" not in at.error[0].value
    assert at.button(key="run").disabled


def test_run_submits_the_chosen_scenario_and_the_url_names_the_job(calibrated: Store) -> None:
    at = open_page("live", kind="measure")
    at.button(key="run").click().run()
    (job,) = calibrated.jobs()
    assert job.kind == "measure" and "name: live-cpu" in job.spec["scenario"]
    assert at.query_params["job"] in (job.id, [job.id])


def _with_events(store: Store) -> str:
    job_id = store.submit_job("compare", {"scenario": LIVE_CPU})
    events = [
        (1.0, "row", _row("int8_weights", 1, None)),
        (2.0, "live", {"t": 1.0, "tokens_per_s": 40.0, "running": 4, "kv_utilization": 0.2, "steps": 9}),
        (2.0, "text", {"request": 3, "prompt": "Why is the sky blue?", "text": " <b>Because</b>"}),
    ]
    store.report(job_id, events, (0.4, "8-bit weights, 4 users, repeat 1 (cell 2 of 5)"))
    return job_id


def test_a_running_job_shows_progress_text_and_predictions(calibrated: Store) -> None:
    job_id = _with_events(calibrated)
    at = open_page("live", job=job_id)
    assert not at.exception
    assert "Why is the sky blue? <b>Because</b>▌" in [text.value for text in at.text]
    at.toggle(key=f"rows_{job_id}_table").set_value(True).run()
    assert any(frame.value[T("column.predicted")].tolist() == ["1.80× (1.62–1.98)"] for frame in at.dataframe)
    at.button(key=f"cancel_{job_id}").click().run()
    assert calibrated.job(job_id).cancel_requested is not None


def test_what_arrives_is_said_of_every_kind_and_names_of_variants_are_no_markdown(calibrated: Store) -> None:
    for arrivals in ARRIVALS:
        document = parse_yaml(LIVE_CPU, "live") | {"techniques": [], "variants": [VARIANT], "sweep": []}
        document["workload"] |= {"arrivals": arrivals}
        at = open_page("live", scenario="own")
        at.text_area(key="draft_live").set_value(yaml.safe_dump(document)).run()
        assert not at.exception and not at.error
        assert text.plain(VARIANT["name"]) in words_of(at) and VARIANT["name"] not in words_of(at)
    kinds = {get_args(kind.model_fields["kind"].annotation)[0] for kind in get_args(get_args(Arrivals)[0])}
    assert all(f"arrivals.{kind}" in sentences(language) for kind in kinds for language in LANGUAGES)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda store, job: store.finish_job(job, "failed", error="The disk is full."), "The disk is full."),
        (lambda store, job: store.finish_job(job, "lost", error="The worker ended.\nline 1"), "The worker ended."),
        (lambda store, job: store.finish_job(job, "cancelled"), T("job.cancelled")),
    ],
)
def test_a_job_that_ended_badly_says_what_and_what_to_do(
    calibrated: Store, end: Callable[[Store, str], None], said: str
) -> None:
    job_id = calibrated.submit_job("compare", {"scenario": LIVE_CPU})
    end(calibrated, job_id)
    at = open_page("live", job=job_id)
    assert not at.exception and said in words_of(at)


def test_an_unknown_job_is_an_error_box_and_the_history_stays(calibrated: Store) -> None:
    _finished_comparison(calibrated)
    at = open_page("live", job="no-such-job")
    assert "no-such-job" in at.error[0].value and T("live.no_job") in words_of(at)
    assert T("history.title") in words_of(at)


def test_history_opens_a_finished_run(calibrated: Store) -> None:
    job = calibrated.job(_finished_comparison(calibrated))
    run_id = calibrated.save_run(
        kind="compare", label="live-cpu", digest="d", scenario_yaml=LIVE_CPU, summary={}, comparison=job.result,
        job_id=job.id,
    )  # fmt: skip
    at = open_page("live")
    at.button(key=f"open_{run_id}").click().run()
    assert at.query_params["run"] in (run_id, [run_id])
    assert not at.exception and any(T("column.verdict") in frame.value for frame in at.dataframe)


def test_a_finished_simulation_shows_its_summary(calibrated: Store) -> None:
    one = {"mean": 0.02, "p50": 0.02, "p90": 0.03, "p99": None}
    summary = {
        "requests": 8, "completed": 8, "duration_s": 3.2, "output_tokens_per_s": 45.0, "kv_utilization": 0.2,
        "ttft_s": one, "tpot_s": one, "itl_s": one, "e2e_s": one, "bottleneck_share": {"compute": 1.0},
    }  # fmt: skip
    job_id = calibrated.submit_job("simulate", {"scenario": LIVE_CPU})
    calibrated.finish_job(job_id, "done", result={"summary": summary, "provenance": {"notes": []}})
    at = open_page("live", job=job_id)
    assert not at.exception and "45.0 tok/s" in [metric.value for metric in at.metric]


def test_a_run_of_the_command_line_is_in_the_history_and_opens(calibrated: Store) -> None:
    run_id = calibrated.save_run(
        kind="compare", label="live-cpu", digest="d", scenario_yaml=LIVE_CPU, summary={"rows": 1},
        comparison={"comparisons": [_row("baseline", 1, 0.021), _row("int8_weights", 1, 1.7)], "notes": []},
    )  # fmt: skip
    at = open_page("live")
    at.button(key=f"open_{run_id}").click().run()
    assert at.query_params["run"] in (run_id, [run_id])
    assert not at.exception and any(T("column.verdict") in frame.value for frame in at.dataframe)


def test_an_imported_run_is_in_the_history_with_the_tool_that_measured_it(calibrated: Store) -> None:
    one = {"mean": 0.02, "p50": 0.02, "p90": 0.03, "p99": None}
    summary = {
        "requests": 8, "completed": 8, "duration_s": 3.2, "output_tokens_per_s": 45.0, "kv_utilization": None,
        "ttft_s": one, "tpot_s": one, "itl_s": one, "e2e_s": one, "bottleneck_share": {},
    }  # fmt: skip
    provenance = {"producer": "endpoint", "endpoint": {"tool": "guidellm"}, "notes": ["the steps were not seen"]}
    run_id = calibrated.save_run(
        kind="measure", label="chat", digest="d", scenario_yaml=LIVE_CPU, summary=summary,
        comparison={"summary": summary, "provenance": provenance},
    )  # fmt: skip
    at = open_page("live")
    assert T("producer.imported", tool="guidellm") in words_of(at)
    at.button(key=f"open_{run_id}").click().run()
    assert not at.exception and "the steps were not seen" in words_of(at)
