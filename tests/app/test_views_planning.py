"""What do Simulate, Plan and Validate show from an empty store to an answer, and what in each state between?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pages import open_page, words_of
from streamlit.testing.v1 import AppTest

from membound.app import jobs, text, uploads
from membound.app.i18n import Translate
from membound.app.records import Job
from membound.app.store import Store
from membound.app.tasks import run_max_rate, run_plan, run_policies, run_validate
from membound.app.views import asked, plan_tables, plan_words, scenario_choice, traffic
from membound.app.views.said import said
from membound.app.worker import JobContext
from membound.roofline.reading.plain_yaml import parse_yaml
from membound.roofline.scenario import load_scenario, parse_scenario
from membound.roofline.validation.tables import OPERATOR_COLUMNS

T = Translate("en")
KINDS = {"simulate": "policies", "plan": "plan"}
TASKS = {"policies": run_policies, "plan": run_plan, "validate": run_validate, "max_rate": run_max_rate}
SMALL_RUN = {"requests": "50", "rate": "4.5", "output": "32", "versus": "static"}
OWN = """
name: own
model: Llama-3.1-8B
hardware: H100-SXM5
techniques: [continuous_batching]
workload:
  arrivals: {kind: poisson, rate_rps: 2}
  requests: 20
  prompts: {kind: synthetic, tokens: {kind: fixed, tokens: 64}}
  output_tokens: {kind: fixed, tokens: 8}
"""
SMALL_PLAN = {
    "plan_model": "Llama-3.1-8B", "plan_devices": "H100-SXM5", "plan_precisions": "given", "plan_together": "True",
}  # fmt: skip


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store that starts no worker."""
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path))

    def submit(store: Store, kind: str, spec: Mapping[str, Any], owner: str = "") -> str:
        return store.submit_job(kind, spec, owner)

    monkeypatch.setattr(jobs, "submit", submit)
    return Store(tmp_path)


def _work(store: Store, job: Job) -> None:
    """Does what the job's worker would do."""
    assert store.start_job(job.id)
    store.finish_job(job.id, "done", result=TASKS[job.kind](job.spec, JobContext(store, job.id)))


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("name", ["simulate", "plan", "validate"])
def test_a_page_works_from_an_empty_store_in_both_languages(store: Store, name: str, language: str) -> None:
    at = open_page(name, lang=language)
    assert not at.exception and not at.error
    assert at.title[0].value == Translate(language)(f"{name}.title")


@pytest.mark.parametrize("name", ["simulate", "plan"])
def test_the_defaults_are_asked_once_whoever_opens_the_page(store: Store, name: str) -> None:
    for _ in range(3):
        at = open_page(name)
    assert [job.kind for job in store.jobs()] == [KINDS[name]]
    assert at.button(key=f"cancel_{store.jobs()[0].id}").label == T("job.cancel")


def test_other_choices_wait_for_the_button(store: Store) -> None:
    at = open_page("simulate", **SMALL_RUN)
    assert store.jobs() == []
    at.button(key="ask_policies").click().run()
    (job,) = store.jobs("policies")
    scenario = parse_scenario(parse_yaml(job.spec["scenario"], "the job"))
    assert scenario.workload.requests == 50 and job.spec["policies"] == ["static"]
    assert scenario.workload.arrivals.rate_rps == 4.5  # type: ignore[union-attr]


def test_a_simulation_is_shown_to_whoever_asks_the_same(store: Store) -> None:
    open_page("simulate", **SMALL_RUN).button(key="ask_policies").click().run()
    _work(store, store.jobs("policies")[0])
    at = open_page("simulate", **SMALL_RUN)
    assert not at.exception and not at.error
    summary = (store.runs("policies")[0].comparison() or {})["cases"][0]["summary"]
    share = f"{100 * summary['slo_attainment']:.1f} %"
    assert T("simulate.answer", share=share, kept=T("simulate.both_objectives")) in words_of(at)
    assert list(at.table[0].value.columns) == [T("simulate.c_metric"), "as chosen", "static"]
    other = open_page("simulate", **(SMALL_RUN | {"rate": "5.0"}))
    assert not other.header, "another question has no answer yet"


def _own(store: Store, **changes: Any) -> AppTest:
    """Simulate with a scenario of somebody's own, answered."""
    scenario = parse_yaml(OWN, "own") | changes
    asked = {"from": "own", "yaml": scenario_choice.packed(yaml.safe_dump(scenario))}
    open_page("simulate", **asked).button(key="ask_policies").click().run()
    _work(store, store.jobs("policies")[0])
    at = open_page("simulate", **asked)
    assert not at.exception and not at.error
    return at


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        ({}, None),
        ({"tpot_s": 0.05}, "the objective for TPOT"),
        ({"e2e_s": 9.0}, "the objective for end to end"),
        ({"ttft_s": 1.0, "e2e_s": 9.0}, "both objectives"),
        ({"ttft_s": 1.0, "tpot_s": 0.05, "e2e_s": 9.0}, "all objectives"),
    ],
)
def test_only_objectives_that_are_given_are_said_to_be_kept(
    store: Store, slo: dict[str, float], kept: str | None
) -> None:
    at = _own(store, slo=slo)
    words, rows = words_of(at), [row for frame in at.table for row in frame.value.iloc[:, 0].astype(str)]
    if kept is None:
        assert at.header[0].value == "20 of 20 requests are answered; no objective is given."
    else:
        assert at.header[0].value == f"100.0 % of the requests keep {kept}."
    assert words.count("(objective ") == len(slo)
    assert (T("simulate.goodput") in [card.label for card in at.metric]) == bool(slo)
    attained = [row for row in rows if row.startswith("Requests that keep")]
    assert attained == ([] if kept is None else [f"Requests that keep {kept}"])


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ([{"count": 2, "parallel": {"tp": 2}}], "4 × H100-SXM5"),
        ([{"parallel": {"tp": 8}}, {"count": 2, "hardware": "L40S"}], "8 × H100-SXM5 + 2 × L40S"),
        ([{"count": 1, "autoscaling": {"max_replicas": 3, "target_queue": 8}}, {}], "up to 4 × H100-SXM5"),
    ],
)
def test_the_conditions_of_a_cluster_count_the_devices_of_each_group(
    store: Store, groups: list[dict[str, Any]], devices: str
) -> None:
    captions = [str(caption.value) for caption in _own(store, cluster={"groups": groups}).caption]
    assert any(f"Llama-3.1-8B on {devices}, 20 requests" in caption for caption in captions)


def test_a_plan_says_how_many_of_each_device(store: Store) -> None:
    open_page("plan", **SMALL_PLAN).button(key="ask_plan").click().run()
    _work(store, store.jobs("plan")[0])
    at = open_page("plan", **SMALL_PLAN)
    assert not at.exception and not at.error
    best = (store.runs("plan")[0].comparison() or {})["devices"][0]["best"]
    assert at.header[0].value.startswith(f"{best['gpus']} × H100-SXM5, ${best['usd_per_h']:.2f} an hour")
    assert [(card.label, card.value) for card in at.metric] == [("H100-SXM5", f"{best['gpus']} GPUs")]


def test_a_chinese_plan_has_no_english_sentence_but_the_names_of_who_lists_prices(store: Store) -> None:
    open_page("plan", **SMALL_PLAN).button(key="ask_plan").click().run()
    _work(store, store.jobs("plan")[0])
    at = open_page("plan", **SMALL_PLAN, lang="zh")
    devices = (store.runs("plan")[0].comparison() or {})["devices"]
    sources = {text.plain(said(one["best"]["price"]["source"], Translate("zh"))) for one in devices}
    tables = [str(cell) for frame in (*at.dataframe, *at.table) for cell in frame.value.to_numpy().ravel()]
    for words in (*words_of(at).split("\n"), *tables):
        for source in sources:
            words = words.replace(source, "")
        assert not re.search(r"(?:[A-Za-z][\w'-]*[ ,;:]+){3,}[A-Za-z]", words), words


def test_a_plan_says_whether_it_holds_at_the_upper_end_of_its_times(store: Store) -> None:
    open_page("plan", **SMALL_PLAN).button(key="ask_plan").click().run()
    _work(store, store.jobs("plan")[0])
    at = open_page("plan", **SMALL_PLAN)
    end = (store.runs("plan")[0].comparison() or {})["devices"][0]["best"]["upper_end"]
    held = "holds" if end["meets_slo"] else "more" if end["gpus_that_meet_it"] else "never"
    error = text.percent(end["relative_error"])
    assert T(f"plan.upper_end_{held}", error=error, gpus=end["gpus_that_meet_it"], device="H100-SXM5") in words_of(at)
    assert any(T("plan.c_upper_end") in frame.value for frame in at.table)


@pytest.mark.parametrize(
    ("end", "words", "cell"),
    [
        (None, "", "–"),
        ({"relative_error": 0.2, "meets_slo": True, "gpus_that_meet_it": 4}, "also holds", "✓"),
        ({"relative_error": 0.2, "meets_slo": False, "gpus_that_meet_it": 6}, "it takes 6 × H100", "✕ 6 GPUs"),
        ({"relative_error": 0.2, "meets_slo": False, "gpus_that_meet_it": None}, "no number of H100", "✕"),
    ],
)
def test_each_case_of_the_upper_end_has_its_words(end: dict[str, Any] | None, words: str, cell: str) -> None:
    deployed = {"device": "H100", "upper_end": end}
    told = plan_words._at_upper_end(deployed, T)
    assert words in told and bool(told) == bool(end) and plan_tables._holds(deployed, T) == cell


def test_nothing_chosen_is_said_not_asked(store: Store) -> None:
    at = open_page("plan", plan_devices="none-of-these")
    assert T("plan.choose_some") in words_of(at) and store.jobs() == []


def test_a_failed_job_says_why_until_it_is_asked_again(store: Store) -> None:
    open_page("plan", **SMALL_PLAN).button(key="ask_plan").click().run()
    store.finish_job(store.jobs("plan")[0].id, "failed", error="field 'model' is 'x': no such model")
    at = open_page("plan", **SMALL_PLAN)
    assert "no such model" in at.error[0].value
    at.button(key="ask_plan").click().run()
    assert len(store.jobs("plan")) == 2 and not open_page("plan", **SMALL_PLAN).error


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"router": "prefix_aware", "replicas": "2"}, "prefix_caching is false"),
        ({"hw": "M4-Max-40c", "formats": "8bit"}, "computes in no 8-bit format"),
        ({"traffic": "trace", "trace": "../../etc/passwd"}, "upload it again"),
        ({"pre": "1", "dec": "1", "replicas": "2"}, "exclude each other"),
    ],
)
def test_what_contradicts_itself_is_one_sentence(store: Store, query: dict[str, str], said: str) -> None:
    at = open_page("simulate", **query)
    assert not at.exception and said in at.error[0].value and store.jobs() == []


@pytest.mark.parametrize("value", ["nan", "-3", "1e400", "inf", "many", ""])
def test_a_number_in_the_url_that_is_none_is_the_default(store: Store, value: str) -> None:
    at = open_page("simulate", rate=value, requests=value)
    assert at.number_input(key="rate").value == traffic.DEFAULTS["rate"]
    assert at.number_input(key="requests").value == traffic.DEFAULTS["requests"]


@pytest.mark.parametrize("kind", traffic.TRAFFICS)
def test_every_kind_of_traffic_makes_a_scenario(store: Store, kind: str) -> None:
    rows = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,10,5\n1.5,20,0\n2.0,30,8\n"
    form = traffic.DEFAULTS | {"traffic": kind, "trace": uploads.keep(store, rows.encode())}
    scenario = traffic.scenario_of(form)
    expected = {"sessions": "poisson"}.get(kind, kind)
    assert scenario.workload.arrivals.kind == expected
    assert parse_scenario(parse_yaml(scenario.to_yaml(), "again")) == scenario


def test_a_question_is_another_one_with_any_other_choice(store: Store) -> None:
    spec = {"scenario": "a", "policies": ["static"]}
    others = [spec, spec | {"policies": []}, spec | {"scenario": "b"}]
    digests = {asked.digest_of("policies", one) for one in others} | {asked.digest_of("plan", spec)}
    assert len(digests) == 4 and asked.digest_of("policies", dict(reversed(spec.items()))) in digests


def test_a_table_in_the_url_is_validated_by_a_job(store: Store) -> None:
    row = dict.fromkeys(OPERATOR_COLUMNS, "") | {"source": "a test", "gpu": "H100-SXM5", "op": "gemm", "dtype": "bf16"}
    row |= {"m": "16", "n": "4096", "k": "4096", "latency_us": "20"}
    digest = uploads.keep(store, "\n".join([",".join(row), ",".join(row.values())]).encode())
    query = {"against": "table", "table": digest}
    open_page("validate", **query).button(key="ask_validate").click().run()
    _work(store, store.jobs("validate")[0])
    at = open_page("validate", **query)
    assert not at.exception and not at.error
    assert T("validate.counts", rows="1", predicted="1", refused="0", judged="1") in words_of(at)


def test_validate_shows_the_shipped_record_until_this_machine_has_runs(store: Store) -> None:
    at = open_page("validate", against="machine")
    assert not at.exception and T("validate.no_runs") in words_of(at)
    assert "11 rows" in at.header[0].value


def test_the_largest_rate_is_found_for_whoever_asks_but_not_of_a_closed_loop(store: Store) -> None:
    open_page("simulate", **SMALL_RUN).button(key="ask_policies").click().run()
    _work(store, store.jobs("policies")[0])
    open_page("simulate", **SMALL_RUN).button(key="ask_max_rate").click().run()
    _work(store, store.jobs("max_rate")[0])
    at = open_page("simulate", **SMALL_RUN)
    found = store.runs("max_rate")[0].comparison() or {}
    assert found["summary"]["ttft_s"]["p99"] <= 1.0 and found["max_rate_rps"] > 4.5
    assert f"{text.digits(found['max_rate_rps'])} requests/s" in words_of(at)

    closed = SMALL_RUN | {"traffic": "closed_loop", "users": "4"}
    open_page("simulate", **closed).button(key="ask_policies").click().run()
    _work(store, store.jobs("policies")[0])
    assert "ask_max_rate" not in {button.key for button in open_page("simulate", **closed).button}


# --- whole scenarios instead of the form ---


def test_a_shipped_scenario_is_simulated_as_it_is(store: Store) -> None:
    at = open_page("simulate", **{"from": "cluster-failover", "versus": "round_robin"})
    assert not at.exception and not at.error and store.jobs() == []
    at.button(key="ask_policies").click().run()
    (job,) = store.jobs("policies")
    scenario = parse_scenario(parse_yaml(job.spec["scenario"], "the job"))
    assert scenario == load_scenario("cluster-failover") and job.spec["policies"] == ["round_robin"]


def test_ones_own_scenario_is_in_the_url(store: Store) -> None:
    text = load_scenario("plan-70b").to_yaml()
    at = open_page("simulate", **{"from": "own", "yaml": scenario_choice.packed(text)})
    assert not at.exception and not at.error
    assert at.text_area(key="draft_simulate").value == text
    at.text_area(key="draft_simulate").set_value(f"{text}nonsense: 1\n").run()
    assert "nonsense" in at.error[0].value


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=500))
def test_a_text_comes_back_from_the_url(text: str) -> None:
    assert scenario_choice.unpacked(scenario_choice.packed(text)) == text


@given(st.text(max_size=60))
def test_what_is_no_packed_text_is_empty(short: str) -> None:
    assert isinstance(scenario_choice.unpacked(short), str)


def test_a_bomb_in_the_url_is_not_unpacked() -> None:
    assert scenario_choice.unpacked(scenario_choice.packed("a" * 50_000_000)) == ""


def test_requests_that_were_turned_away_are_said_with_the_reason(store: Store) -> None:
    query = {"model": "OPT-2.7B", "requests": "20", "prompt": "4000", "spread": "fixed", "versus": ""}
    open_page("simulate", **query).button(key="ask_policies").click().run()
    _work(store, store.jobs("policies")[0])
    at = open_page("simulate", **query)
    assert not at.exception and at.header[0].value == T("simulate.nobody", requests="20")
    assert "20 of 20 requests" in at.warning[0].value and "because" in at.warning[0].value
