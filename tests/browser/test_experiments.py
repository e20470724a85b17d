"""Does page Experiments run one, draw what it found and give its numbers away, in both languages?"""

from __future__ import annotations

import csv
from collections.abc import Callable
from typing import Any

import pytest

from membound.app.i18n import Translate

pytestmark = [pytest.mark.browser, pytest.mark.slow]

Session = Callable[..., Any]
TIMEOUT_MS, JOB_TIMEOUT_MS = 60_000, 240_000
EN, ZH = Translate("en"), Translate("zh")


def test_an_experiment_is_run_drawn_downloaded_and_found_in_another_session(session: Session) -> None:
    tab = session().open("/experiments")
    tab.choose(EN("experiments.which"), EN("experiments.x5"))
    tab.sees(EN("experiments.about_x5"))
    tab.sees(EN("experiments.empty"))
    tab.click(EN("experiments.run"))
    tab.drawn(JOB_TIMEOUT_MS)
    tab.settle()
    tab.page.locator("[data-testid=stCheckbox]", has_text=EN("chart.table")).click(timeout=TIMEOUT_MS)
    with tab.page.expect_download(timeout=TIMEOUT_MS) as download:
        tab.page.get_by_role("button", name=EN("chart.csv")).click(timeout=TIMEOUT_MS)
    assert download.value.suggested_filename == "x5.csv"
    rows = list(csv.DictReader(download.value.path().read_text("utf-8").splitlines()))
    assert rows
    assert all(row for row in rows[0].values())
    with tab.page.expect_download(timeout=TIMEOUT_MS) as download:
        tab.click(EN("download.html"))
    assert download.value.suggested_filename == "x5.html"
    report = download.value.path().read_text("utf-8")
    assert "<script src=" not in report and report.count("<tr>") == 1 + len(rows)
    tab.settle()

    other = session(locale="zh-CN", color_scheme="dark", viewport={"width": 400, "height": 800}).open("/experiments")
    other.sees(ZH("experiments.title"))
    other.drawn(TIMEOUT_MS)
    other.page.get_by_role("button", name=ZH("asked.again"), exact=True).wait_for(timeout=TIMEOUT_MS)
    other.fits()
    other.settle()


def test_an_experiment_that_the_link_misspells_is_the_default_one(session: Session) -> None:
    tab = session().open("/experiments?experiment=x99")
    tab.sees(EN("experiments.about_x5"))
    tab.settle()
