"""Do Techniques, Stack and Advisor answer a person with a real browser, in both languages, narrow and wide?"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from membound.app.i18n import Translate

pytestmark = [pytest.mark.browser, pytest.mark.slow]

Session = Callable[..., Any]
PAGES = ("techniques", "stack", "advisor")
TIMEOUT_MS, ANSWER_TIMEOUT_MS = 60_000, 300_000
EN, ZH = Translate("en"), Translate("zh")
WIDE, NARROW = {"width": 1360, "height": 900}, {"width": 400, "height": 800}
# What the server may compute for a control, median, with a page of many charts: twice what it takes on a machine that
# does nothing else, whose clock would tell of other work.
CONTROL_CPU_S = 0.8


@pytest.mark.parametrize(("language", "scheme", "viewport"), [("en", "light", NARROW), ("zh", "dark", WIDE)])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_draws_its_answer(
    session: Session, name: str, language: str, scheme: str, viewport: dict[str, int]
) -> None:
    locale = {"en": "en-US", "zh": "zh-CN"}[language]
    tab = session(locale=locale, color_scheme=scheme, viewport=viewport).open(f"/{name}?batch=32")
    tab.sees({"en": EN, "zh": ZH}[language](f"{name}.title"))
    tab.drawn(TIMEOUT_MS)
    tab.answers(re.compile(r"\d\.\d\d×"))
    tab.fits()
    tab.settle()


@pytest.mark.parametrize("name", [*PAGES, "explore", "simulate", "plan"])
def test_on_a_phone_the_answer_is_on_the_first_screen_and_the_form_a_line_that_opens(
    session: Session, name: str
) -> None:
    phone = session(viewport={"width": 390, "height": 844}).open(f"/{name}")
    answer = phone.page.locator(".stMainBlockContainer h2").first
    answer.wait_for(timeout=ANSWER_TIMEOUT_MS)
    box = answer.bounding_box()
    assert box is not None and box["y"] + box["height"] < 844
    field = phone.page.locator(".st-key-form [data-testid=stSelectbox]").first
    assert not field.is_visible()
    phone.page.locator(".st-key-form_open label").click()
    field.wait_for(state="visible", timeout=TIMEOUT_MS)
    phone.fits()
    phone.settle()


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_a_charts_buttons_lie_on_nothing_and_names_leave_it_half_of_the_width(
    session: Session, viewport: dict[str, int]
) -> None:
    tab = session(viewport=viewport).open("/techniques?batch=32")
    tab.drawn(TIMEOUT_MS)
    chart = tab.page.locator(".membound-chart").first
    bar, legend, plot = (chart.locator(part).first.bounding_box() for part in (".modebar", ".legend", ".nsewdrag"))
    assert bar["y"] >= chart.bounding_box()["y"] and bar["y"] + bar["height"] <= legend["y"] < plot["y"]
    assert plot["width"] > 0.5 * chart.bounding_box()["width"]


def test_a_newcomer_learns_whether_speculation_helps_at_batch_32(session: Session) -> None:
    tab = session().open("/")
    tab.page.get_by_role("link", name=EN("start.ask_techniques")).click()
    # the link on Start, which is still there while the page is read, asks the same
    answer = re.compile(r"Does speculation help at batch 32\?.*Yes: 1\.", re.DOTALL)
    tab.page.locator("li", has_text=answer).wait_for(timeout=TIMEOUT_MS)
    tab.at("batch=32")
    tab.choose(EN("techniques.part"), EN("techniques.part_sweep"))
    tab.sees(re.compile("pays up to batch"))
    tab.settle()


@pytest.mark.parametrize("name", PAGES)
def test_a_link_is_the_page(session: Session, name: str) -> None:
    path = f"/{name}?model=Qwen2.5-7B&hw=A100-SXM4-80GB&batch=64&ctx=4096&gain=tpot_s"
    first = session().open(path)
    answer = first.answer
    second = session().open(first.page.url.removeprefix(first.url))
    second.answers(answer)
    second.at("model=Qwen2.5-7B", "batch=64", "gain=tpot_s")
    for tab in (first, second):
        tab.settle()


@pytest.mark.parametrize("name", PAGES)
def test_a_model_that_does_not_fit_is_said_with_what_would_help(session: Session, name: str) -> None:
    tab = session().open(f"/{name}?model=Llama-3.1-405B&hw=L4")
    tab.sees(re.compile("does not fit"))
    tab.settle()


def test_techniques_that_exclude_each_other_are_refused_and_the_rest_is_drawn(session: Session) -> None:
    tab = session().open("/stack?stack=weight_quantization,w8a8,eagle")
    tab.page.locator("[data-testid=stAlert]", has_text="weights cannot be awq and fp8 at once").wait_for()
    tab.answers(re.compile("^Gain in"))
    tab.settle()


def test_many_techniques_are_computed_as_a_job_and_found_again(session: Session) -> None:
    tab = session().open("/stack?batch=1&stack=weight_quantization,kv_quantization,eagle,flash_attention,sparsity_2_4")
    tab.page.get_by_role("button", name=EN("stack.analyse", techniques=5)).click()
    tab.page.get_by_role("heading", name=re.compile("^Gain in")).wait_for(timeout=180_000)
    tab.settle()
    again = session().open(tab.page.url.removeprefix(tab.url))
    again.answers(tab.answer)


def test_the_advisors_first_move_opens_in_the_stack(session: Session) -> None:
    tab = session().open("/advisor?batch=32")
    tab.page.get_by_role("button", name=EN("advisor.to_stack")).first.click()
    tab.page.wait_for_url(re.compile("/stack"), timeout=TIMEOUT_MS)
    tab.page.wait_for_url(re.compile("batch=32"), timeout=TIMEOUT_MS)
    tab.page.get_by_role("heading", name=re.compile("^Gain in")).wait_for(timeout=TIMEOUT_MS)
    tab.at("stack=eagle")
    tab.settle()


def test_numbers_are_shown_as_a_table_and_downloaded(session: Session) -> None:
    tab = session().open("/techniques?part=sweep&sweep=eagle")
    tab.page.get_by_text(EN("chart.table"), exact=True).click()
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name=EN("chart.csv")).click()
    lines = download.value.path().read_text("utf-8").splitlines()
    assert lines[0].startswith("Technique,batch,") and len(lines) == 12
    tab.settle()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc is Linux's")
def test_a_control_costs_the_server_little(session: Session, dashboard: Any) -> None:
    tab = session().open("/techniques?batch=1")
    for batch in ("16", "64"):  # every point once, so that the answers and the pages are warm
        _answer(tab, batch)
    took = []
    for batch in ("16", "64", "16", "64", "16"):
        before = _cpu_s(dashboard.process.pid)
        _answer(tab, batch)
        took.append(_cpu_s(dashboard.process.pid) - before)
    assert 0 < statistics.median(took) < CONTROL_CPU_S


def _answer(tab: Any, batch: str) -> None:
    """The click on a batch, until the whole page is the new answer."""
    tab.choose(EN("choice.batch"), batch)
    tab.page.locator("li", has_text=f"Does speculation help at batch {batch}?").wait_for(timeout=TIMEOUT_MS)
    tab.settle()


def _cpu_s(pid: int) -> float:
    """What a process has computed until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
