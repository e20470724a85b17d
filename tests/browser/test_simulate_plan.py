"""Do Plan, Simulate and Validate answer a person with a real browser?"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from membound.app.i18n import Translate
from membound.roofline.validation.tables import OPERATOR_COLUMNS

pytestmark = [pytest.mark.browser, pytest.mark.slow]

Session = Callable[..., Any]
TIMEOUT_MS, JOB_TIMEOUT_MS = 60_000, 300_000
EN = Translate("en")
# small enough that a job takes a second of computing
SMALL_PLAN = (
    "/plan?plan_model=Llama-3.1-8B&plan_devices=H100-SXM5&plan_precisions=given&plan_together=True&plan_rate=2.0"
)
SMALL_RUN = "/simulate?requests=60&rate=4.0&output=32"
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02d}.0000000,{100 + second},{20 + second}\n" for second in range(50)
)


def _ask(tab: Any, label: str) -> None:
    tab.page.get_by_role("button", name=label, exact=True).click(timeout=TIMEOUT_MS)
    tab.page.get_by_role("button", name=EN("asked.again"), exact=True).wait_for(timeout=JOB_TIMEOUT_MS)
    tab.drawn(TIMEOUT_MS)


def test_a_newcomer_learns_how_many_h100_a_70b_model_needs_at_10_requests_a_second(session: Session) -> None:
    """By the question on Start and by the menu."""
    tab = session().open("/")
    tab.page.get_by_role("link", name=EN("start.ask_plan")).click()
    tab.page.locator("[data-testid=stMetric]", has_text="H100-SXM5").wait_for(timeout=JOB_TIMEOUT_MS)
    tab.settle()
    tab.open("/").page.locator("[data-testid=stTopNavLink]", has_text=EN("nav.plan")).click()
    card = tab.page.locator("[data-testid=stMetric]", has_text="H100-SXM5")
    card.wait_for(timeout=JOB_TIMEOUT_MS)
    assert re.search(r"\d+ GPUs", card.inner_text())
    tab.sees("Llama-3.1-70B at 10.0 requests/s")
    tab.settle()


def test_a_deployment_opens_in_simulate_with_all_that_it_is(session: Session) -> None:
    tab = session().open(SMALL_PLAN)
    _ask(tab, EN("plan.run"))
    tab.page.get_by_role("button", name=re.compile(r"\d+ × H100-SXM5")).first.click()
    tab.page.wait_for_url(re.compile(r"/simulate\?.*rate=2.0"), timeout=TIMEOUT_MS)
    tab.sees(EN("simulate.title"))
    tab.at("spread=fixed")
    tab.settle()


def test_the_answer_outlives_the_reload_and_is_there_for_a_second_session(session: Session) -> None:
    tab = session().open(SMALL_RUN)
    _ask(tab, EN("simulate.run"))
    answer = tab.answer
    assert "keep both objectives" in answer
    tab.page.reload()
    other = session().open(tab.page.url.removeprefix(tab.url))
    for one in (tab, other):
        one.drawn(TIMEOUT_MS)
        one.answers(answer)
        one.settle()


def test_an_answer_outlives_the_server_that_was_asked(chromium: Any, dashboard: Any, tmp_path: Path) -> None:
    context = chromium.new_context(locale="en-US")
    page = context.new_page()
    first = type(dashboard)(tmp_path)
    page.goto(first.url + SMALL_RUN, timeout=TIMEOUT_MS)
    page.get_by_role("button", name=EN("simulate.run"), exact=True).click(timeout=TIMEOUT_MS)
    while not any(job.pid for job in first.store.jobs("policies")):
        page.wait_for_timeout(100)
    os.killpg(first.process.pid, signal.SIGKILL)
    first.process.wait()
    second = type(dashboard)(tmp_path)
    try:
        page.goto(second.url + SMALL_RUN, timeout=TIMEOUT_MS)
        page.get_by_role("button", name=EN("asked.again"), exact=True).wait_for(timeout=JOB_TIMEOUT_MS)
        assert len(second.store.jobs("policies")) == 1
    finally:
        second.end()
        context.close()


def test_a_run_downloads_as_a_timeline_and_as_its_scenario(session: Session) -> None:
    tab = session().open(SMALL_RUN)
    if tab.page.get_by_role("button", name=EN("simulate.run"), exact=True).count():
        _ask(tab, EN("simulate.run"))
    for label, held in ((EN("simulate.perfetto"), '"traceEvents"'), (EN("download.yaml"), "max_num_seqs: 128")):
        with tab.page.expect_download(timeout=TIMEOUT_MS) as download:
            tab.page.get_by_role("button", name=label, exact=True).click()
        assert held in download.value.path().read_text("utf-8")
    tab.settle()


def test_a_chart_downloads_as_png_and_as_svg(session: Session) -> None:
    tab = session().open("/validate")
    chart = tab.page.locator(".js-plotly-plot").first
    chart.hover(timeout=TIMEOUT_MS)
    for button, begin in (("chart.png", b"\x89PNG"), ("chart.svg", b"<svg")):
        with tab.page.expect_download(timeout=TIMEOUT_MS) as download:
            chart.locator(f".modebar-btn[data-title='{EN(button)}']").click()
        assert download.value.path().read_bytes().startswith(begin)
    tab.settle()


def test_a_long_simulation_is_cancelled(session: Session) -> None:
    tab = session().open("/simulate?requests=100000&rate=40.0&versus=static,continuous,prefill_first")
    tab.page.get_by_role("button", name=EN("simulate.run"), exact=True).click(timeout=TIMEOUT_MS)
    tab.page.locator(".membound-job", has_text="requests").wait_for(timeout=JOB_TIMEOUT_MS)
    tab.page.reload()
    tab.page.get_by_role("button", name=EN("job.cancel"), exact=True).click(timeout=TIMEOUT_MS)
    tab.sees(EN("job.cancelled"), JOB_TIMEOUT_MS)
    tab.settle()


def test_choices_that_contradict_each_other_are_one_sentence(session: Session) -> None:
    tab = session().open("/simulate?replicas=2&router=prefix_aware")
    tab.page.locator("[data-testid=stAlert]", has_text="prefix_caching is false").wait_for(timeout=TIMEOUT_MS)
    tab.settle()


def test_a_trace_is_uploaded_simulated_and_linked(session: Session, tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(TRACE)
    tab = session().open("/simulate?traffic=trace&versus=static")
    tab.page.locator("input[type=file]").set_input_files(path)
    tab.page.wait_for_url(re.compile("trace=[0-9a-f]{16}"), timeout=TIMEOUT_MS)
    tab.sees("The first 50 requests come within 49.0 s")
    _ask(tab, EN("simulate.run"))
    answer = tab.answer
    other = session().open(tab.page.url.removeprefix(tab.url))
    other.drawn(TIMEOUT_MS)
    other.answers(answer)
    tab.settle()


def test_a_file_that_is_no_trace_is_one_sentence(session: Session, tmp_path: Path) -> None:
    path = tmp_path / "nonsense.csv"
    path.write_text("a,b\n1,2\n")
    tab = session().open("/simulate?traffic=trace")
    tab.page.locator("input[type=file]").set_input_files(path)
    tab.page.locator("[data-testid=stAlert]", has_text="which are those of no known format").wait_for(
        timeout=TIMEOUT_MS
    )
    tab.settle()


def test_an_uploaded_table_is_validated_and_a_wrong_one_refused(session: Session, tmp_path: Path) -> None:
    row = dict.fromkeys(OPERATOR_COLUMNS, "") | {"source": "a test", "gpu": "H100-SXM5", "op": "gemm", "dtype": "bf16"}
    rows = [row | {"m": str(m), "n": "4096", "k": "4096", "latency_us": "30"} for m in (1, 16, 256)]
    lines = [",".join(OPERATOR_COLUMNS), *(",".join(one.values()) for one in rows)]
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    good.write_text("\n".join(lines))
    bad.write_text("x,y\n1,2\n")
    tab = session().open("/validate?against=table")
    tab.page.locator("input[type=file]").set_input_files(good)
    tab.drawn(JOB_TIMEOUT_MS)
    tab.sees("3 rows: 3 predicted, 0 refused")
    tab.settle()
    tab.page.locator("input[type=file]").set_input_files(bad)
    tab.page.locator("[data-testid=stAlert]", has_text="lacks the columns").wait_for(timeout=JOB_TIMEOUT_MS)
    tab.settle()
