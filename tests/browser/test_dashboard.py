"""Does a person with a real browser get what the pages promise? Runs on Chromium against the real server."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driving import DRAWN
from fake_tasks import HOLD

from membound.app.compare import predict_rows
from membound.app.i18n import Translate
from membound.app.keeping import keep_comparison
from membound.roofline.hardware import get_hardware
from membound.roofline.reading.plain_yaml import parse_yaml
from membound.roofline.scenario import parse_scenario

pytestmark = [pytest.mark.browser, pytest.mark.slow]

Session = Callable[..., Any]
HERE = Path(__file__).parent
SHORT = (HERE / "short.yaml").read_text("utf-8")
LONG = re.sub(r"requests: \d+", "requests: 4000", SHORT).replace("browser-short", "browser-long")
RUN_TIMEOUT_MS, PAGE_TIMEOUT_MS = 300_000, 60_000
EN, ZH = Translate("en"), Translate("zh")


def _paste(tab: Any, scenario: str) -> None:
    tab.open("/live?scenario=own")
    draft = tab.page.get_by_label(EN("live.paste"))
    draft.fill(scenario)
    draft.press("Control+Enter")
    tab.sees("2 users in a closed loop")
    tab.settle()


def test_a_newcomer_gets_the_roofline_without_asking_and_measures_with_one_click(
    session: Session, uncalibrated: Callable[..., Any]
) -> None:
    pytest.importorskip("torch")
    server = uncalibrated(MEMBOUND_TASKS="calibrate=fake_tasks:calibrate", PYTHONPATH=str(HERE))
    hold = server.home / HOLD
    hold.touch()
    one, two = session(server).open("/"), session(server).open("/")
    one.page.locator(".membound-job", has_text="bandwidth of memory").wait_for(timeout=PAGE_TIMEOUT_MS)
    hold.unlink()
    for tab in (one, two):
        tab.drawn(PAGE_TIMEOUT_MS)
        tab.sees("Decode on this machine is bound by")
    assert len(server.store.jobs("calibrate")) == 1

    one.click(EN("start.measure"))
    one.sees(EN("live.rows"), RUN_TIMEOUT_MS)
    one.page.locator(".membound-written", has_text="assistant").wait_for(timeout=RUN_TIMEOUT_MS)
    one.page.reload()
    one.click(EN("job.cancel"))
    one.sees(EN("job.cancelled"), RUN_TIMEOUT_MS)
    for tab in (one, two):
        tab.settle()


def test_no_page_is_shown_before_the_login_that_a_deployment_asks_for(
    session: Session, uncalibrated: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / ".streamlit").mkdir()
    (tmp_path / ".streamlit" / "secrets.toml").write_text(
        '[auth]\nredirect_uri = "http://localhost/oauth2callback"\ncookie_secret = "of a test"\nclient_id = "test"\n'
        'client_secret = "of a test"\nserver_metadata_url = "http://127.0.0.1:1/"\n',
        "utf-8",
    )
    server = uncalibrated()
    for path in ("/", "/live", "/plan"):
        tab = session(server).open(path)
        tab.sees(EN("login.title"))
        assert tab.page.locator("h1").count() == 1
        assert tab.page.get_by_role("button", name=EN("login.button"), exact=True).count() == 1
    assert server.store.jobs() == []


def test_the_language_switch_holds_on_every_page(session: Session) -> None:
    tab = session().open("/")
    tab.choose("中文", "中文")
    tab.sees(ZH("start.title"))
    tab.at("lang=zh")
    tab.page.locator("[data-testid=stTopNavLink]", has_text=ZH("nav.explore")).click()
    tab.sees(ZH("explore.title"))
    tab.settle()


def test_a_link_to_explore_is_the_page(session: Session) -> None:
    tab = session().open("/explore")
    tab.choose(EN("choice.techniques"), "8-bit weights")
    tab.page.wait_for_url(re.compile("with=int8_weights"), timeout=PAGE_TIMEOUT_MS)
    tab.choose(EN("choice.batch"), "64")
    tab.page.wait_for_url(re.compile("batch=64"), timeout=PAGE_TIMEOUT_MS)
    tab.settle()
    answer = tab.page.get_by_role("heading", level=2).first.inner_text()
    other = session().open(tab.page.url.removeprefix(tab.url))
    other.sees(answer)
    tab.at("with=int8_weights")
    other.check()


def test_the_step_moves_along_the_roofs_without_the_server(session: Session) -> None:
    tab = session().open("/explore")
    chart = "document.querySelector('.js-plotly-plot')"
    star = f"{chart}._fullData.find(({{ name }}) => name === '{EN('explore.this_step')}')"
    tab.drawn(PAGE_TIMEOUT_MS)
    answer = tab.answer
    before, at = tab.page.evaluate(f"[{star}.x[0], {chart}.layout.sliders[0].active]")
    rail = tab.page.locator(".slider-rail-touch-rect").first
    rail.scroll_into_view_if_needed()
    box = rail.bounding_box()
    tab.page.mouse.click(box["x"] + box["width"] - 8, box["y"] + box["height"] / 2)
    tab.page.wait_for_function(f"{star}.x[0] > {before}", timeout=PAGE_TIMEOUT_MS)
    tab.page.wait_for_function(f"{chart}.layout.sliders[0].active > {at}", timeout=PAGE_TIMEOUT_MS)
    said = EN("roofline.at", batch=128, time="#", bound="#", share="#").partition("#")[0]
    tab.page.locator(".js-plotly-plot .textpoint", has_text=said).wait_for(timeout=PAGE_TIMEOUT_MS)
    assert tab.settle().answer == answer, "the page itself is still that of its own batch"


def test_a_chart_may_be_taken_down_before_it_is_all_there(session: Session) -> None:
    """Where a slider can put a chart is added when the browser is idle: by then the table may be in its place."""
    tab = session()
    tab.page.add_init_script("window.requestIdleCallback = (then) => setTimeout(then, 4000)")
    tab.open("/explore").drawn(PAGE_TIMEOUT_MS)
    tab.page.get_by_text(EN("chart.table"), exact=True).first.click()
    tab.page.get_by_role("button", name=EN("chart.csv")).first.wait_for(timeout=PAGE_TIMEOUT_MS)
    tab.page.wait_for_timeout(4000)
    tab.check()


def test_a_wrong_scenario_is_one_sentence_in_an_error_box(session: Session) -> None:
    tab = session().open("/live?scenario=own")
    draft = tab.page.get_by_label(EN("live.paste"))
    draft.fill(f"{SHORT}nonsense: 1\n")
    draft.press("Control+Enter")
    tab.page.locator("[data-testid=stAlert]", has_text="nonsense").wait_for(timeout=PAGE_TIMEOUT_MS)
    assert tab.page.get_by_role("button", name=EN("live.run"), exact=True).is_disabled()
    tab.check()


def test_a_run_is_watched_cancelled_and_found_again(session: Session, dashboard: Any) -> None:
    pytest.importorskip("torch")
    tab = session()
    _paste(tab, LONG)
    tab.click(EN("live.run"))
    tab.page.wait_for_url(re.compile("job="), timeout=PAGE_TIMEOUT_MS)
    job_id = re.search(r"job=([\w-]+)", tab.page.url).group(1)  # type: ignore[union-attr]
    tab.page.locator(".membound-job", has_text="engines in turn").wait_for(timeout=RUN_TIMEOUT_MS)
    tab.drawn(RUN_TIMEOUT_MS)
    tab.page.wait_for_function(
        "document.querySelector('.membound-chart')?._fullData?.[0]?.y?.length > 1", timeout=RUN_TIMEOUT_MS
    )
    tab.check()

    tab.page.reload()
    tab.page.locator(".membound-job").first.wait_for(timeout=PAGE_TIMEOUT_MS)
    watcher = session().open(f"/live?job={job_id}")
    tab.click(EN("job.cancel"))
    for each in (tab, watcher):
        each.sees(EN("job.cancelled"), RUN_TIMEOUT_MS)
        each.settle()
    assert dashboard.store.job(job_id).state == "cancelled"


def test_a_finished_run_outlives_the_reload_and_the_server(session: Session, dashboard: Any) -> None:
    pytest.importorskip("torch")
    tab = session()
    _paste(tab, SHORT)
    tab.click(EN("live.run"))
    tab.page.wait_for_url(re.compile("job="), timeout=PAGE_TIMEOUT_MS)
    tab.sees(EN("results.gains"), RUN_TIMEOUT_MS)
    tab.settle()
    tab.page.reload()
    tab.sees(EN("results.gains"))
    path = tab.page.url.removeprefix(tab.url)
    tab.check()

    dashboard.kill()
    dashboard.start()
    again = session().open(path)
    again.sees(EN("results.gains"))
    with again.page.expect_download() as download:
        again.page.get_by_role("button", name=EN("download.json")).click()
    assert '"comparisons"' in download.value.path().read_text("utf-8")
    again.settle()


def test_a_kept_run_downloads_as_timelines_and_as_a_page_that_opens_without_a_server(
    session: Session, dashboard: Any, tmp_path: Path
) -> None:
    scenario = parse_scenario(parse_yaml(SHORT.replace("hardware: local", "hardware: H100-SXM5"), "the scenario"))
    result = predict_rows(scenario, get_hardware(scenario.hardware))
    run_id = keep_comparison(dashboard.store, scenario, result)
    tab = session(viewport={"width": 400, "height": 800}).open(f"/live?run={run_id}")
    with tab.page.expect_download(timeout=PAGE_TIMEOUT_MS) as download:
        tab.click(EN("simulate.perfetto"))
    assert zipfile.is_zipfile(download.value.path())
    with tab.page.expect_download(timeout=PAGE_TIMEOUT_MS) as download:
        tab.click(EN("download.html"))
    download.value.save_as(tmp_path / "report.html")
    tab.settle()
    alone = session(offline=True).page
    alone.goto((tmp_path / "report.html").as_uri())
    alone.wait_for_selector(DRAWN, timeout=PAGE_TIMEOUT_MS)
    assert scenario.model in alone.inner_text("body")


def test_two_sessions_keep_their_drafts_and_share_the_history(session: Session, dashboard: Any) -> None:
    one, two = session(), session()
    _paste(one, SHORT)
    two.open("/live?scenario=own")
    assert two.page.get_by_label(EN("live.paste")).input_value() == ""
    job_id = dashboard.store.submit_job("simulate", {"scenario": SHORT.replace("browser-short", "shared")})
    dashboard.store.finish_job(job_id, "cancelled")
    for each in (one, two):
        each.page.reload()
        each.page.locator("strong", has_text=re.compile("^shared$")).wait_for(timeout=PAGE_TIMEOUT_MS)
        each.settle()
